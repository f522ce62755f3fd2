"""The configuration of a serving system: strict, frozen, and read from one file.

``load_config`` is the only place that reads the environment: ``HDSERVE_CONFIG``,
``HDSERVE_API_KEYS_FILE``, ``HDSERVE_ADMIN_KEY_FILE`` and ``HDSERVE_ADMIN_KEY``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from hdserve.config_errors import LineOf, describe_errors, nowhere
from hdserve.errors import ConfigError
from hdserve.models import BUNDLED_PREFIX, bundled_models
from hdserve.strict_yaml import line_of, read_text, read_yaml

CONFIG_ENVIRONMENT_VARIABLE = "HDSERVE_CONFIG"
API_KEYS_FILE_ENVIRONMENT_VARIABLE = "HDSERVE_API_KEYS_FILE"
ADMIN_KEY_ENVIRONMENT_VARIABLE = "HDSERVE_ADMIN_KEY"
ADMIN_KEY_FILE_ENVIRONMENT_VARIABLE = "HDSERVE_ADMIN_KEY_FILE"

Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Device = Literal["auto", "cpu", "cuda"]


Model = TypeVar("Model", bound=BaseModel)


class StrictModel(BaseModel):
    """A frozen pydantic model that refuses unknown keys, and numbers that are not finite."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_kind(cls, value: Any, info: ValidationInfo) -> Any:
        """``true`` is no 1, and 1 is no ``true``."""
        assert info.field_name is not None
        annotation = cls.model_fields[info.field_name].annotation
        is_union = get_origin(annotation) in (Union, UnionType)
        kinds = get_args(annotation) if is_union else (annotation,)
        takes_numbers = int in kinds or float in kinds
        if isinstance(value, bool) and takes_numbers and bool not in kinds:
            raise ValueError("a number is expected, not true or false")
        if type(value) in (int, float) and bool in kinds and not takes_numbers:
            raise ValueError("true or false is expected, not a number")
        return value


def _check_is_once(what: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{what} {name!r} twice")


class DrafterConfig(StrictModel):
    """One draft source and its options, which the source itself checks."""

    name: str
    """One of the registered sources."""

    options: dict[str, Any] = Field(default_factory=dict)
    """See the options of the sources."""


class DraftingConfig(StrictModel):
    """How drafts are made for one model."""

    drafters: tuple[DrafterConfig, ...] = (DrafterConfig(name="hierarchy"),)
    """Sources in the order in which they fill a tree."""

    max_draft_tokens: int = Field(default=16, ge=0, le=256)
    """Most drafted tokens of one sequence in one step; 0 decodes plainly."""

    max_depth: int = Field(default=24, ge=1, le=256)
    """Longest path of a draft tree."""

    adapts_budget: bool = True
    """Whether the size of the trees follows the measured cost of a forward, down to no drafts."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        _check_is_once("drafters names", [drafter.name for drafter in self.drafters])
        return self


class EngineConfig(StrictModel):
    """The engine of one replica."""

    dtype: Dtype = "auto"
    """``auto``: bfloat16 where the hardware multiplies it natively, else float32."""

    device: Device = "auto"
    """``auto``: a GPU where there is one."""

    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt and output together; default: what the model was made for."""

    max_num_sequences: int = Field(default=16, ge=1)
    """Most sequences decoded at a time."""

    max_num_queued: int = Field(default=256, ge=0)
    """Most sequences that wait for a place in a replica; one more is refused with 429.  While a
    model has no replica, requests wait in each gateway, as many as all replicas take."""

    kv_cache_tokens: int | None = Field(default=None, ge=32)
    """Rows of the KV cache; default: from the memory that is free."""

    prefill_chunk_tokens: int = Field(default=256, ge=1)
    """Most prompt tokens in one step."""

    prefill_slowdown: float = Field(default=2.0, gt=1.0)
    """By how much prompts may lengthen a step in which others decode: so much is measured as steps
    go by, and a chunk of a prompt is cut to it, but for 16 tokens that always go.  Prompts get more
    where more sequences wait for theirs than decode."""

    prefix_caching: bool = True
    """Whether prompts that begin like an earlier sequence of the same namespace reuse its keys and
    values while they are still there."""

    exact: bool | Literal["auto"] = "auto"
    """Whether a row's result may not depend on what else is in a forward, so that drafted output
    equals plain output in every bit; ``auto``: where that costs at most 3 % in decoding and in
    prompts, as it mostly does once a model is compiled on a CPU."""

    compile: bool | Literal["auto"] = "auto"
    """Whether the model runs as one compiled graph, 1.3 to 2 times as fast on a CPU: ``true``
    compiles it before the first request; ``auto`` compiles it beside the first requests of a
    server on a CPU that has a C++ compiler, but in general not with ``exact: true``: answers would
    be others from then on."""

    num_threads: int | None = Field(default=None, ge=1)
    """Threads of the CPU kernels; default: ``num_cpus`` of the model from one on, below it the
    cores of the machine or container shared by the models."""

    @property
    def max_num_open(self) -> int:
        """Most sequences that are decoded or wait."""
        return self.max_num_sequences + self.max_num_queued


class AutoscalingPolicy(StrictModel):
    """What decides how many replicas there are, instead of Ray Serve's own rule."""

    policy_function: str = Field(min_length=1)
    """A function or class, as ``path.to.module:name``."""

    policy_kwargs: dict[str, Any] = Field(default_factory=dict)
    """What a class is made with."""


class AutoscalingConfig(StrictModel):
    """Ray Serve's ``autoscaling_config``, in place of ``num_replicas``; without it nothing
    scales."""

    min_replicas: int = Field(default=1, ge=0)
    """Fewest processes; with 0 the first request after a pause waits until a model is loaded."""

    max_replicas: int = Field(default=1, ge=1)
    """Most processes."""

    initial_replicas: int | None = Field(default=None, ge=0)
    """How many there are at first; default: ``min_replicas``."""

    target_ongoing_requests: float = Field(default=2.0, gt=0)
    """Requests per replica, about three quarters of ``engine.max_num_sequences``: with more there
    are more replicas, with fewer fewer."""

    upscale_delay_s: float = Field(default=30.0, ge=0)
    """How long there must be too few replicas."""

    downscale_delay_s: float = Field(default=600.0, ge=0)
    """How long there must be too many."""

    downscale_to_zero_delay_s: float | None = Field(default=None, ge=0)
    """How long the last one must be too many; default: ``downscale_delay_s``."""

    upscaling_factor: float | None = Field(default=None, gt=0)
    """Above 1 it scales up in larger steps, below in smaller ones."""

    downscaling_factor: float | None = Field(default=None, gt=0)
    """The same for scaling down."""

    look_back_period_s: float = Field(default=30.0, gt=0)
    """Over which time requests are counted."""

    aggregation_function: Literal["mean", "max", "min"] = "mean"
    """What is taken of the counts in this time."""

    policy: AutoscalingPolicy | None = None

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError("max_replicas is below min_replicas")
        initial = self.initial_replicas
        if initial is not None and not self.min_replicas <= initial <= self.max_replicas:
            raise ValueError("initial_replicas is not between min_replicas and max_replicas")
        return self


class ModelConfig(StrictModel):
    """One served model."""

    name: str = Field(min_length=1)
    """The ``model`` of a request."""

    model: str = Field(min_length=1)
    """A bundled model's name, a local directory or a Hugging Face id."""

    revision: str | None = None
    """Of a Hugging Face id: a branch, tag or commit."""

    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""

    load_format: Literal["safetensors", "auto"] = "safetensors"
    """``auto`` also loads weights that are pickled, which can run code."""

    aliases: tuple[str, ...] = ()
    """Further names a request may use."""

    engine: EngineConfig = EngineConfig()
    drafting: DraftingConfig = DraftingConfig()
    statistics: str | None = "bundled"
    """The directory of a statistics database; ``bundled`` takes what ships for this tokenizer, if
    there is one."""

    draft_from: tuple[str, ...] = ()
    """Other models of the same tokenizer whose generated text may be drafted from, ranked lower."""

    chat_template: Path | None = None
    """A file with the Jinja template that makes prompts of chats, on every node of the model;
    ``None`` takes the model's own."""

    tool_parser: Literal["hermes", "llama3_json"] | None = "hermes"
    """How the model writes tool calls; ``None`` refuses tools."""

    reasoning_parser: Literal["think"] | None = None
    """How the model marks what it thinks before it answers a chat, which is then given apart;
    ``None`` leaves it in the text."""

    share_output: bool = True
    """Whether finished outputs enter the cluster's model database."""

    num_replicas: int | None = Field(default=None, ge=1)
    """How many processes serve this model; default: 1, unless ``autoscaling`` says."""

    autoscaling: AutoscalingConfig | None = None

    session_affinity: bool = True
    """Whether requests of one conversation prefer the replica that served it."""

    num_cpus: float = Field(default=0.5, ge=0)
    """What Ray reserves for a replica; says nothing about its threads."""

    num_gpus: float = Field(default=0, ge=0)
    """What Ray reserves for a replica: whole GPUs, or a part of one."""

    resources: dict[str, Annotated[float, Field(strict=True)]] = Field(default_factory=dict)
    """Custom Ray resources of a replica."""

    @property
    def first_num_replicas(self) -> int:
        """How many processes serve this model at first."""
        scaling = self.autoscaling
        if scaling is None:
            return self.num_replicas or 1
        return (
            scaling.min_replicas if scaling.initial_replicas is None else scaling.initial_replicas
        )

    @property
    def max_num_replicas(self) -> int:
        """Most processes that serve this model."""
        if self.autoscaling is None:
            return self.num_replicas or 1
        return self.autoscaling.max_replicas

    @field_validator("model")
    @classmethod
    def _check_model(cls, model: str) -> str:
        bundled = bundled_models()
        is_ours = model.startswith(BUNDLED_PREFIX) and "/" not in model
        if is_ours and model not in bundled and not Path(model).exists():
            raise ValueError(f"no bundled model is called {model}: there are {', '.join(bundled)}")
        return model

    @field_validator("num_gpus")
    @classmethod
    def _check_gpus(cls, num_gpus: float) -> float:
        if num_gpus > 1 and not num_gpus.is_integer():
            raise ValueError("a whole number, or a part of one GPU, is expected")
        return num_gpus

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.autoscaling is not None and self.num_replicas is not None:
            raise ValueError("num_replicas and autoscaling exclude each other")
        return self


class ModelDatabaseConfig(StrictModel):
    """The cluster-wide database of generated text."""

    is_enabled: bool = True
    """Whether replicas share what they generate."""

    max_bytes: int = Field(default=256 * 2**20, ge=2**16)
    """Most bytes of text of one model: in the actor that of each namespace, in a replica that of
    all together, the largest of which gives way first."""

    max_total_bytes: int = Field(default=2**30, ge=2**16)
    """Most bytes of text all namespaces of one model keep in the actor."""

    refill_bytes: int = Field(default=32 * 2**20, ge=0)
    """Most bytes of recent text each replica keeps for an actor that has lost its disk."""

    snapshot_dir: Path | None = None
    """Where the actor keeps its snapshots; ``None`` keeps nothing on disk."""

    snapshot_interval_s: float = Field(default=10.0, gt=0)
    """How much a power failure may lose; a killed actor loses nothing it acknowledged."""

    publish_interval_s: float = Field(default=0.2, gt=0)
    """How often a replica publishes what it generated."""

    poll_interval_s: float = Field(default=0.5, gt=0)
    """How often a replica asks for what others generated."""

    num_shards: int = Field(default=1, ge=1, le=256)
    """Actors that share the namespaces of each model among them.  Each namespace is in one, so
    this spreads the load of many tenants; text kept under another number stays on its disk."""

    num_cpus: float = Field(default=0.1, ge=0)
    """What Ray reserves for each actor."""


class GatewayConfig(StrictModel):
    """The HTTP side."""

    num_replicas: int = Field(default=1, ge=1)
    """How many processes take requests."""

    num_cpus: float = Field(default=0.2, ge=0)
    """What Ray reserves for each."""

    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    """A larger request is refused with 413."""

    max_import_bytes: int = Field(default=4 * 2**30, ge=1024)
    """Most bytes of an archive the administrator imports."""

    max_ongoing_requests: int = Field(default=1000, ge=1)
    """Most requests a gateway answers at a time."""

    max_queued_requests: int | None = Field(default=None, ge=1)
    """Most requests that wait at each HTTP proxy of Ray Serve while every gateway is full; one more
    is answered with 429 by the proxy.  A burst counts until it is handed out, so this should be
    more than come in one; ``None`` lets all of them wait."""

    request_timeout_s: float | None = Field(default=None, gt=0)
    """How long an answer may take, from the arrival of the request to its last byte: what is not
    complete then is ended with an error; ``None`` lets it take as long as it takes."""

    strict_requests: bool = False
    """Whether a request with a field nobody documents is refused; otherwise the field is named in
    the header ``x-hdserve-ignored``."""

    allowed_origins: tuple[str, ...] = ()
    """Origins whose web pages may ask this server from a browser, as in
    ``https://chat.example.com``; ``*`` is all of them.  Its own page may always."""

    @field_validator("allowed_origins")
    @classmethod
    def _check_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        if not all(re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^\s/*]+", item) for item in origins):
            raise ValueError(
                "an origin without a path, as in https://chat.example.com, or '*' is expected"
            )
        return origins


class AccessConfig(StrictModel):
    """Who may use the application.  Files are read again when they change."""

    api_keys_file: Path | None = None
    """A line per key: the key and the namespace of its model databases, ``default`` without one.
    ``None`` lets everybody in.  ``HDSERVE_API_KEYS_FILE`` replaces it."""

    admin_key_file: Path | None = None
    """A file of one line, the key for ``/v1/speculation``, which is closed while there is no such
    file.  ``HDSERVE_ADMIN_KEY_FILE`` replaces it."""

    admin_key: SecretStr | None = None
    """That key itself; with neither, ``/v1/speculation`` is closed.  ``HDSERVE_ADMIN_KEY``
    replaces both."""

    @model_validator(mode="after")
    def _check_admin_key(self) -> Self:
        if self.admin_key is not None and self.admin_key_file is not None:
            raise ValueError("there is one administrator's key: admin_key or admin_key_file")
        return self


class TelemetryConfig(StrictModel):
    """Traces of requests through gateway, replica and engine."""

    endpoint: str | None = None
    """Where traces go: the OTLP/HTTP address of an OpenTelemetry collector, such as
    ``http://collector:4318/v1/traces``; ``None`` makes none.  Needs ``hdserve[tracing]``."""

    sample_ratio: float = Field(default=0.01, ge=0, le=1)
    """Which share of the requests is traced when the client's ``traceparent`` does not decide."""

    max_steps: int = Field(default=64, ge=0, le=1024)
    """Of how many engine steps of a traced request, from its first, a span is made."""

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", endpoint):
            raise ValueError("an address that begins with http:// or https:// is expected")
        return endpoint


class ServeConfig(StrictModel):
    """A whole application: the models, their databases, and the gateway."""

    models: tuple[ModelConfig, ...] = Field(min_length=1)
    """The first one is the default of clients that take the first of ``/v1/models``."""

    access: AccessConfig = AccessConfig()
    gateway: GatewayConfig = GatewayConfig()
    model_database: ModelDatabaseConfig = ModelDatabaseConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    statistics_root: Path | None = None
    """A directory of every node with statistics databases, of which the administrator may have
    the replicas of a model draft from another one while they run; ``None`` allows none."""

    drain_timeout_s: float = Field(default=120.0, ge=0)
    """How long a process that is replaced or removed may take to end what it has begun to answer;
    what is not done by then fails."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [name for model in self.models for name in (model.name, *model.aliases)]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two models are called {name!r}")
        known = {model.name for model in self.models}
        for model in self.models:
            _check_is_once(f"{model.name}: draft_from names", model.draft_from)
            for other in model.draft_from:
                if other == model.name:
                    raise ValueError(f"{model.name}: draft_from names the model itself")
                if other not in known:
                    raise ValueError(f"{model.name}: draft_from names the unknown model {other!r}")
        return self


def default_config() -> ServeConfig:
    """The configuration of ``serve run deployments:app``: the two bundled models."""
    return ServeConfig(
        models=(
            ModelConfig(name="hdserve-tiny", model="hdserve-tiny"),
            ModelConfig(name="hdserve-mini", model="hdserve-mini"),
        )
    )


def parse_config(data: Mapping[str, Any], line_of: LineOf = nowhere) -> ServeConfig:
    """Check ``data`` and make a configuration of it.

    Args:
        line_of: finds the line of a location in the file ``data`` comes from.

    Raises:
        ConfigError: names every wrong key or value, and for an unknown key the known ones.
    """
    return checked(ServeConfig, data, line_of)


def checked(model: type[Model], data: Mapping[str, Any], line_of: LineOf = nowhere) -> Model:
    """``data`` as a section of a configuration.

    Raises:
        ConfigError: as :func:`parse_config` does.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(describe_errors(model, error, line_of))) from error


def load_config(
    source: str | Path | Mapping[str, Any] | None = None, line_of: LineOf = nowhere
) -> ServeConfig:
    """The configuration, with what the environment says of access.

    Args:
        source: a YAML file, or what one holds; default: the file ``HDSERVE_CONFIG`` names, else
            the bundled models.
        line_of: as in :func:`parse_config`, of what a file holds.

    Raises:
        ConfigError: the file cannot be read or is wrong.
    """
    if source is None or source == "":
        source = os.environ.get(CONFIG_ENVIRONMENT_VARIABLE)
    if source is None or source == "":
        config = default_config()
    elif isinstance(source, Mapping):
        config = parse_config(source, line_of)
    else:
        config = read_config(source)
    return config.model_copy(update={"access": _access_by_environment(config.access)})


def _access_by_environment(access: AccessConfig) -> AccessConfig:
    found = {name: getattr(access, name) for name in AccessConfig.model_fields}
    if keys_file := os.environ.get(API_KEYS_FILE_ENVIRONMENT_VARIABLE):
        found["api_keys_file"] = Path(keys_file)
    if admin_key_file := os.environ.get(ADMIN_KEY_FILE_ENVIRONMENT_VARIABLE):
        found |= {"admin_key_file": Path(admin_key_file), "admin_key": None}
    if admin_key := os.environ.get(ADMIN_KEY_ENVIRONMENT_VARIABLE):
        found |= {"admin_key_file": None, "admin_key": SecretStr(admin_key)}
    return AccessConfig(**found)


def read_config(path: str | Path) -> ServeConfig:
    """Read a YAML file, and nothing else.

    Raises:
        ConfigError: the file cannot be read or is wrong.
    """
    data = read_yaml(path)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: keys with values are expected, as in `models: ...`")
    try:
        return parse_config(data, partial(line_of, read_text(path)))
    except ConfigError as error:
        raise ConfigError(f"{path}:\n{error.message}") from error
