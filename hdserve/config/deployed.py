"""A configuration inside what deploys it.

Three kinds of YAML files hold one::

    models: ...                                   the configuration itself
    applications: [{args: {config: ...}}]         a Serve config file of Ray, or serveConfigV2
    kind: RayService, spec: {serveConfigV2: ...}  a manifest of KubeRay, perhaps among others
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hdserve.config.application import ServeConfig
from hdserve.config.loading import load_config
from hdserve.config.mistakes import LineOf, Location, nowhere
from hdserve.config.strict_yaml import line_of as yaml_line_of
from hdserve.config.strict_yaml import load_documents, parse_yaml, read_yaml
from hdserve.errors import ConfigError

IMPORT_PATH = "deployments:app"
APPLICATION = "hdserve"
GATEWAY_DEPLOYMENT = "gateway"

OWN_CLUSTER = "local"
"""The address by which Ray starts a cluster that ends with the application."""

PROXY_VARIABLES: Mapping[str, str] = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.http.proxy_headers:middlewares"
}
"""Environment variables for middlewares in front of Ray Serve's own code where HTTP arrives: in its
proxies, and in gateways behind HAProxy."""

_SERVE_PORT = 8000
"""Ray Serve's default."""


@dataclass(frozen=True, slots=True)
class DeployedConfig:
    """The content of a file.

    Attributes:
        port: where Ray Serve is told to listen; ``None`` in a plain configuration, which does not
            say.
        line_of: finds the line of a location of the configuration in the file.
    """

    config: ServeConfig
    port: int | None = None
    line_of: LineOf = nowhere


def deployment_name(model: str) -> str:
    """Return the name of a model's deployment in Ray Serve."""
    return f"model-{model}"


def read_deployed_config(path: str | Path) -> DeployedConfig:
    """Read a file of any of the three kinds, as a server does: with a file it names, and the access
    settings of the environment.

    Raises:
        ConfigError: it cannot be read or is wrong; the message begins with the file and says where
            in it the configuration is.
    """
    documents, text = read_yaml(path, load_documents)
    line_of = partial(yaml_line_of, text) if len(documents) == 1 else nowhere
    try:
        return _in_documents(documents, line_of)
    except ConfigError as error:
        raise ConfigError(f"{path}:\n{error.message}") from error


def _in_documents(documents: list[Any], line_of: LineOf) -> DeployedConfig:
    found = [item for item in documents if item is not None]
    if not found or not all(isinstance(item, dict) for item in found):
        raise ConfigError("keys with values are expected, as in `models: ...`")
    if not any("kind" in item for item in found):
        if len(documents) > 1:
            raise ConfigError("one document is expected; a line of `---` begins another one")
        if "applications" in found[0]:
            return _in_serve_config(found[0], line_of)
        return DeployedConfig(load_config(found[0], line_of), line_of=line_of)
    services = [item for item in found if item.get("kind") == "RayService"]
    if len(services) != 1:
        kinds = ", ".join(sorted({str(item.get("kind")) for item in found}))
        raise ConfigError(f"one RayService is expected, there are {len(services)} among {kinds}")
    spec = services[0].get("spec")
    text = spec.get("serveConfigV2") if isinstance(spec, dict) else None
    try:
        data = parse_yaml(text) if isinstance(text, str) else None
    except ValueError as error:
        raise ConfigError(f"spec.serveConfigV2: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError("spec.serveConfigV2: the text of a Serve config file is expected")
    return _in_serve_config(data, nowhere, "spec.serveConfigV2: ")


def _in_serve_config(data: Mapping[str, Any], line_of: LineOf, within: str = "") -> DeployedConfig:
    applications = data.get("applications")
    if not isinstance(applications, list) or not all(isinstance(a, dict) for a in applications):
        raise ConfigError(f"{within}applications: a list of mappings is expected")
    ours = [n for n, item in enumerate(applications) if item.get("import_path") == IMPORT_PATH]
    if len(ours) != 1:
        found = ", ".join(str(item.get("import_path")) for item in applications)
        raise ConfigError(
            f"{within}applications: one with the import_path {IMPORT_PATH} is expected, "
            f"there are {len(ours)} among {found or 'none'}"
        )
    application, place = applications[ours[0]], f"{within}applications.{ours[0]}"
    arguments = application.get("args") or {}

    def line_of_config(location: Location) -> int | None:
        return line_of(("applications", ours[0], "args", "config", *location))

    config = _of_arguments(arguments, f"{place}.args", line_of_config)
    _check_deployments(application.get("deployments") or [], config, f"{place}.deployments")
    options = data.get("http_options") or {}
    port = options.get("port", _SERVE_PORT) if isinstance(options, dict) else None
    if type(port) is not int or not 1 <= port <= 65535:
        raise ConfigError(f"{within}http_options.port: {port!r} is not a port")
    is_inside = isinstance(arguments.get("config"), dict)
    return DeployedConfig(config, port, line_of_config if is_inside else nowhere)


def _of_arguments(arguments: Any, place: str, line_of: LineOf) -> ServeConfig:
    if not isinstance(arguments, dict) or not arguments.keys() <= {"config"}:
        raise ConfigError(f"{place}: a mapping is expected whose only key is `config`")
    config = arguments.get("config")
    if not isinstance(config, str | dict | None):
        raise ConfigError(f"{place}.config: a file or a mapping is expected")
    try:
        return load_config(config, line_of)
    except ConfigError as error:
        raise ConfigError(f"{place}.config:\n{error.message}") from error


def _check_deployments(deployments: Any, config: ServeConfig, place: str) -> None:
    """Check that settings for single deployments, next to ``args``, are for existing ones, and have
    an effect."""
    known = [GATEWAY_DEPLOYMENT, *(deployment_name(model.name) for model in config.models)]
    scaled = {deployment_name(m.name) for m in config.models if m.autoscaling is not None}
    for index, item in enumerate(deployments if isinstance(deployments, list) else [deployments]):
        options = item if isinstance(item, dict) else {"name": item}
        name = options.get("name")
        if name not in known:
            raise ConfigError(
                f"{place}.{index}.name: there is no deployment {name!r}; there are "
                f"{', '.join(known)}"
            )
        scales_itself = name in scaled and options.get("autoscaling_config", {}) is not None
        if scales_itself and options.get("num_replicas") is not None:
            raise ConfigError(
                f"{place}.{index}.num_replicas: Ray Serve passes over it, because this model has "
                "`autoscaling`; give a whole `autoscaling_config` here instead, with other "
                "min_replicas and max_replicas"
            )
