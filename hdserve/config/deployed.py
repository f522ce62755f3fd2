"""A configuration inside what deploys it.

Three kinds of YAML files hold one::

    models: ...                                   the configuration itself
    applications: [{args: {config: ...}}]         a Serve config file of Ray, or serveConfigV2
    kind: RayService, spec: {serveConfigV2: ...}  a manifest of KubeRay, perhaps among others
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hdserve.config.application import GatewayConfig, ServeConfig
from hdserve.config.loading import checked, load_config
from hdserve.config.mistakes import WHOLE, LineOf, Location, nowhere
from hdserve.config.model import AutoscalingConfig, ModelConfig
from hdserve.config.strict_model import StrictModel
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

GRPC_VARIABLES: Mapping[str, str] = {"grpc_proxy": ""}
"""Environment variables with which processes call each other by gRPC past a proxy that
``http_proxy`` or ``https_proxy`` names, whether or not ``no_proxy`` has the nodes' addresses."""

DEFAULT_PORT = 8000
"""Where Ray Serve listens unless it is told otherwise."""

LARGEST_NUMBER = 2**31 - 1
"""More than this Ray Serve cannot be told."""

_AUTO, _MAX_AUTO_REPLICAS = "auto", 100
"""The ``num_replicas`` with which Ray Serve scales by itself, and then its default bound."""

_NO_ACTOR_OPTIONS = (
    "Ray Serve takes them in place of all that the deployment reserves, and of the environment "
    "variables that it needs; set num_cpus, num_gpus and resources of the model in `args`, or "
    "num_cpus and resources of `gateway` there"
)

Section = TypeVar("Section", bound=StrictModel)


@dataclass(frozen=True, slots=True)
class DeployedConfig:
    """The content of a file.

    Attributes:
        config: with the numbers of ``deployments``, next to ``args``, in place of its own.
        built: what the application is built of, which knows nothing of those numbers.
        port: where Ray Serve is told to listen; ``None`` in a plain configuration, which does not
            say.
        line_of: finds the line of a location of the configuration in the file.
        is_for_pods: whether it is in a manifest, so that what it names is where its pods run.
        warnings: what is probably a mistake in ``deployments``.
    """

    config: ServeConfig
    built: ServeConfig
    port: int | None = None
    line_of: LineOf = nowhere
    is_for_pods: bool = False
    warnings: tuple[str, ...] = ()


def as_it_is(config: ServeConfig, line_of: LineOf = nowhere) -> DeployedConfig:
    """Return a configuration that nothing is next to."""
    return DeployedConfig(config, config, line_of=line_of)


def application_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the application as a Serve config file of Ray has it."""
    return {
        "name": APPLICATION,
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        "args": arguments,
    }


def deployment_name(model: str) -> str:
    """Return the name of a model's deployment in Ray Serve."""
    return f"model-{model}"


def num_held(model: ModelConfig) -> int:
    """Return how many requests for a model each gateway holds while there is no replica: as many as
    all replicas take."""
    return min(model.max_num_open, LARGEST_NUMBER)


def read_deployed_config(path: str | Path) -> DeployedConfig:
    """Read a file of any of the three kinds, as a server does: with a file it names, and the access
    settings of the environment.

    Raises:
        ConfigError: it cannot be read or is wrong; the message begins with the file and says where
            in it the configuration is.
    """
    return deployed_config(path, *read_yaml(path, load_documents))


def deployed_config(path: str | Path, documents: list[Any], text: str) -> DeployedConfig:
    """Return what :func:`read_deployed_config` does of a file that has been read.

    Args:
        documents: those of ``text``, which the file has.

    Raises:
        ConfigError: it is wrong.
    """
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
        return as_it_is(load_config(found[0], line_of), line_of)
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
    return replace(_in_serve_config(data, nowhere, "spec.serveConfigV2: "), is_for_pods=True)


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

    built = _of_arguments(arguments, f"{place}.args", line_of_config)
    beside = _settings(application.get("deployments") or [])
    config = _with_deployments(beside, built, f"{place}.deployments")
    warnings = tuple(_short_queues(beside, config, built, f"{place}.deployments"))
    options = data.get("http_options") or {}
    port = options.get("port", DEFAULT_PORT) if isinstance(options, dict) else None
    if type(port) is not int or not 1 <= port <= 65535:
        raise ConfigError(f"{within}http_options.port: {port!r} is not a port")
    is_inside = isinstance(arguments.get("config"), dict)
    place_of_config = line_of_config if is_inside else nowhere
    return DeployedConfig(config, built, port, place_of_config, warnings=warnings)


def _of_arguments(arguments: Any, place: str, line_of: LineOf) -> ServeConfig:
    if not isinstance(arguments, dict) or not arguments.keys() <= {"config", "is_local"}:
        raise ConfigError(f"{place}: a mapping is expected whose only key is `config`")
    config = arguments.get("config")
    if not isinstance(config, str | dict | None):
        raise ConfigError(f"{place}.config: a file or a mapping is expected")
    try:
        return load_config(config, line_of)
    except ConfigError as error:
        raise ConfigError(f"{place}.config:\n{error.message}") from error


def _settings(deployments: Any) -> list[Mapping[str, Any]]:
    """Return the settings for single deployments, next to ``args``; what is none is the name of
    one."""
    items = deployments if isinstance(deployments, list) else [deployments]
    return [item if isinstance(item, dict) else {"name": item} for item in items]


def _with_deployments(
    deployments: Sequence[Mapping[str, Any]], config: ServeConfig, place: str
) -> ServeConfig:
    """Return ``config`` with the numbers of processes and requests that settings for single
    deployments, next to ``args``, replace.

    Raises:
        ConfigError: one is for no deployment, is wrong, has no effect, takes away what a deployment
            needs, or has one that gateways do not know.
    """
    gateway, models = config.gateway, {deployment_name(m.name): m for m in config.models}
    for index, options in enumerate(deployments):
        name, where = options.get("name"), f"{place}.{index}"
        if "ray_actor_options" in options:
            raise ConfigError(f"{where}.ray_actor_options: {_NO_ACTOR_OPTIONS}")
        if name == GATEWAY_DEPLOYMENT:
            gateway = _gateway_with(gateway, options, where)
        elif name in models:
            models[name] = _model_with(models[name], options, where)
        else:
            known = ", ".join([GATEWAY_DEPLOYMENT, *models])
            raise ConfigError(f"{where}.name: there is no deployment {name!r}; there are {known}")
    return config.model_copy(update={"gateway": gateway, "models": tuple(models.values())})


def _short_queues(
    deployments: Sequence[Mapping[str, Any]], config: ServeConfig, built: ServeConfig, place: str
) -> Iterator[str]:
    """Yield which models have more replicas by ``deployments``, which are right, than gateways hold
    requests for."""
    known = {deployment_name(model.name): num_held(model) for model in built.models}
    wanted = {deployment_name(model.name): num_held(model) for model in config.models}
    for index, options in enumerate(deployments):
        name = options["name"]
        held, taken = options.get("max_queued_requests", known.get(name)), wanted.get(name, 0)
        if isinstance(held, int) and 0 <= held < taken:
            yield (
                f"{place}.{index}.max_queued_requests: Ray Serve lets {held} requests for {name} "
                "wait at each gateway, and others are refused, although its replicas take "
                f"{taken}; {taken} is expected"
            )


def _gateway_with(gateway: GatewayConfig, options: Mapping[str, Any], place: str) -> GatewayConfig:
    """Return ``gateway`` with the numbers that Ray Serve takes from ``options``; of gateways that
    it scales, the least.

    Raises:
        ConfigError: see :func:`_with_deployments`.
    """
    scaling = options.get("autoscaling_config")
    if scaling is not None or options.get("num_replicas") == _AUTO:
        own = AutoscalingConfig(max_replicas=_MAX_AUTO_REPLICAS)
        bounds = _replaced(own, scaling or {}, ("min_replicas",), f"{place}.autoscaling_config")
        options = {**options, "num_replicas": max(1, bounds.min_replicas)}
    return _replaced(gateway, options, ("num_replicas", "max_ongoing_requests"), place)


def _model_with(model: ModelConfig, options: Mapping[str, Any], place: str) -> ModelConfig:
    """Return ``model`` with the numbers of processes that Ray Serve takes from ``options``.

    Raises:
        ConfigError: see :func:`_with_deployments`.
    """
    number, scaling = options.get("num_replicas"), options.get("autoscaling_config", {})
    if model.autoscaling is not None and scaling is not None and number is not None:
        raise ConfigError(
            f"{place}.num_replicas: Ray Serve passes over it, because this model has "
            "`autoscaling`; give a whole `autoscaling_config` here instead, with other "
            "min_replicas and max_replicas"
        )
    if number == _AUTO or options.get("autoscaling_config") is not None:
        most = _MAX_AUTO_REPLICAS if number == _AUTO else 1
        first = {"min_replicas": 1, "max_replicas": most, "initial_replicas": None}
        own = (model.autoscaling or AutoscalingConfig()).model_copy(update=first)
        bounds = _replaced(own, scaling or {}, tuple(first), f"{place}.autoscaling_config")
        if bounds.min_replicas == 0 and model.min_num_replicas:
            raise ConfigError(
                f"{place}.autoscaling_config.min_replicas: 0 is to be in `args`, too, as "
                "`autoscaling: {min_replicas: 0}` of the model: the gateways read nothing else, "
                "and would wake it whenever they are asked whether they are ready"
            )
        return model.model_copy(update={"num_replicas": None, "autoscaling": bounds})
    if number is None and scaling is not None:
        return model
    alone = model.model_copy(update={"autoscaling": None})
    return _replaced(alone, options, ("num_replicas",), place)


def _replaced(section: Section, values: Any, names: Collection[str], place: str) -> Section:
    """Return ``section`` with those of ``values`` that have these names.

    Raises:
        ConfigError: one is wrong.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{place}: a mapping is expected")
    chosen = {name: values[name] for name in names if name in values}
    try:
        return checked(type(section), {**section.model_dump(exclude_unset=True), **chosen})
    except ConfigError as error:
        message = error.message.removeprefix(f"{WHOLE}: ")
        separator = ": " if message != error.message else "."
        raise ConfigError(f"{place}{separator}{message}") from error
