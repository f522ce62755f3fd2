"""``serve run deployments:app``: the builder of the whole application."""

# No "from __future__ import annotations" here: Ray Serve reads the annotation of the builder's
# argument, and does not validate the argument if the annotation is a string.

import logging
from typing import Any

from ray import serve

from deployments.gateway import gateway_deployment
from deployments.model_deployment import model_deployment
from deployments.nodes import all_resources
from hdserve.access import read_access
from hdserve.config import AccessConfig, ServeConfig, StrictModel, load_config
from hdserve.doctor.gpus import shortage, with_gpus
from hdserve.telemetry import check_tracing

logger = logging.getLogger(__name__)


class AppArgs(StrictModel):
    """The arguments of ``serve run deployments:app [config=FILE]``."""

    config: str | dict[str, Any] | None = None
    """A YAML file, or the configuration itself; default: ``HDSERVE_CONFIG``, else the bundled
    models."""

    is_local: bool = False
    """Whether only clients on the machine of the server reach it, as ``hdserve serve`` says."""


def app(args: AppArgs) -> serve.Application:
    """Build the application: one deployment per model, and the gateway.

    Raises:
        ConfigError: the configuration is wrong.
    """
    config = load_config(args.config)
    if _has_key(args.config):
        logger.warning("Ray logs arguments: put the key in a file, access.admin_key_file")
    check_tracing(config.telemetry)
    access = read_access(config.access)
    if args.is_local and not access.keys and config.gateway.allowed_hosts is None:
        config = _for_local_names(config)
    config = _with_gpus(config).model_copy(update={"access": AccessConfig()})
    models = {model.name: model_deployment(model, config) for model in config.models}
    return gateway_deployment(config, models, access)


def _for_local_names(config: ServeConfig) -> ServeConfig:
    """Return ``config`` with gateways that may be called by local names only: another name is that
    of a web page that wants to read what nobody needs a key for."""
    gateway = config.gateway.model_copy(update={"allowed_hosts": ()})
    return config.model_copy(update={"gateway": gateway})


def _with_gpus(config: ServeConfig) -> ServeConfig:
    """Return ``config`` with what each replica reserves of a GPU."""
    nodes = all_resources()
    if (lack := shortage(config, nodes)) is not None:
        logger.warning("%s; to mend it: %s", *lack)
    return with_gpus(config, nodes)


def _has_key(config: str | dict[str, Any] | None) -> bool:
    """Whether the administrator's key itself is in the arguments."""
    access = config.get("access") if isinstance(config, dict) else None
    return isinstance(access, dict) and access.get("admin_key") is not None
