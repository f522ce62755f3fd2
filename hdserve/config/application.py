"""The configuration of an application: its models, and what they share."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from hdserve.config.mistakes import Location, Mistakes
from hdserve.config.model import MOST_REQUESTS, ModelConfig
from hdserve.config.model_name import name_fault
from hdserve.config.reserved import CustomResources, Reserved
from hdserve.config.strict_model import StrictModel

_IMPLIED_PORTS: Final = {"http": ":80", "https": ":443"}


class ModelDatabaseConfig(StrictModel):
    """The cluster-wide database of generated text.  Its actors keep the settings they were started
    with, also when another configuration is deployed, until ``hdserve database stop``."""

    is_enabled: bool = True
    """Whether replicas share what they generate."""

    max_bytes: int = Field(default=256 * 2**20, ge=2**16)
    """Most bytes of what one model generated: in the actor, for each namespace, as token ids, 4
    bytes a token; in a replica, for all namespaces together, as look-up tables, 135 to 205 bytes a
    token, where the largest namespace gives way first."""

    max_total_bytes: int = Field(default=2**30, ge=2**16)
    """Most bytes of text all namespaces of one model keep in the actor; in that of each shard, if
    there are several."""

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
    """Number of actors among which the namespaces of each model are divided, to spread the load of
    many tenants.  Text kept under another number stays on its disk until its namespace is
    forgotten."""

    num_cpus: Reserved = 0.1
    """What Ray reserves for each actor."""

    resources: CustomResources = Field(default_factory=dict)
    """Custom Ray resources of each actor, and of the statistics databases' actor, so that they run
    on nodes that have them."""


class GatewayConfig(StrictModel):
    """The HTTP side."""

    num_replicas: int = Field(default=1, ge=1)
    """How many processes take requests."""

    num_cpus: Reserved = 0.2
    """What Ray reserves for each."""

    resources: CustomResources = Field(default_factory=dict)
    """Custom Ray resources of each, so that they run on nodes that have them."""

    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    """A larger request is refused with 413.  Each request that is answered or waits keeps its body
    in memory, see ``max_held_body_bytes``.  Agents that send screenshots need more, such as 32
    MiB."""

    max_import_bytes: int = Field(default=4 * 2**30, ge=1024)
    """Most bytes of an archive the administrator imports."""

    max_ongoing_requests: int = Field(default=1000, ge=1, le=MOST_REQUESTS)
    """Most requests a gateway answers at a time.  All gateways together should accept more than the
    replicas of all models decode and queue: then a replica refuses excess requests, at once and
    with ``retry-after``, and ``/health`` and ``/metrics`` need not wait."""

    max_queued_requests: int | None = Field(default=None, ge=1, le=MOST_REQUESTS)
    """Most requests that wait at each HTTP proxy of Ray Serve while every gateway is full, or, with
    HAProxy as the proxy, at each gateway; Ray Serve answers further ones with 429.  Requests of a
    burst count until they are handed out, so this should exceed the largest burst; ``None`` lets
    all of them wait."""

    max_held_body_bytes: int = Field(default=2**30, ge=1024)
    """Most bytes of bodies in the memory of a gateway, of all requests that it answers or that wait
    for it, if HAProxy is the proxy.  Beyond it, a request whose body has more than 64 KiB is not
    read before others have ended; one body is always read, however large it may be."""

    request_timeout_s: float | None = Field(default=None, gt=0)
    """How long an answer may take, from the arrival of the request to its last byte: an answer that
    is not complete then ends with an error; ``None`` sets no limit."""

    max_replica_silence_s: float = Field(default=30.0, ge=1)
    """A replica that was not heard of for so long, or up to a quarter longer, is taken for dead:
    the answers it had begun end with 503, ``engine_stopped``, or with that error in mid-stream, and
    requests it had not confirmed go to another one.  Replicas whose process responds give signs of
    life, also while a request waits or a long prompt is computed."""

    stream_keep_alive_s: float | None = Field(default=15.0, gt=0)
    """A stream that has been silent for so long sends a comment, in ``/v1/messages`` a ``ping``,
    and another one after each further silence of that length: clients and proxies close connections
    on which nothing arrives.  ``None`` sends none."""

    strict_requests: bool = False
    """Whether a request with an undocumented field, with tools, items or parts that are left out,
    or with a schema that cannot be enforced in full, is refused; otherwise these are named in the
    header ``x-hdserve-ignored``."""

    allowed_origins: tuple[str, ...] = ()
    """Origins whose web pages may ask this server from a browser, as in
    ``https://chat.example.com``; ``*`` is all of them.  Its own page may always."""

    allowed_hosts: tuple[str, ...] | None = None
    """Names that clients may call this server by, as in ``chat.example.com``, besides addresses,
    ``localhost`` and names below ``.localhost``, which they always may; a request whose ``host`` is
    another name is refused with 403.  ``*`` is all of them, and so is ``None``; but without API
    keys, ``hdserve serve`` on a loopback address takes ``None`` for none of them."""

    @property
    def max_num_ongoing(self) -> int:
        """The most requests that all gateways answer at a time."""
        return self.num_replicas * self.max_ongoing_requests

    @field_validator("allowed_origins")
    @classmethod
    def _check_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        if not all(re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^\s/*]+", item) for item in origins):
            raise ValueError(
                "an origin without a path, as in https://chat.example.com, or '*' is expected"
            )
        return tuple(map(_as_browsers_write, origins))

    @field_validator("allowed_hosts")
    @classmethod
    def _check_hosts(cls, hosts: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if not all(re.fullmatch(r"\*|[\w-]+(\.[\w-]+)*", item, re.ASCII) for item in hosts or ()):
            raise ValueError(
                "a host name without scheme and port, as in chat.example.com, or '*' is expected"
            )
        return hosts


def _as_browsers_write(origin: str) -> str:
    """Return an origin with a host in lower case, and without the port that its scheme implies."""
    port = _IMPLIED_PORTS.get(origin.partition(":")[0])
    return origin if port is None else origin.lower().removesuffix(port)


class AccessConfig(StrictModel):
    """Who may use the application.  Files are read again when they change."""

    api_keys_file: Path | None = None
    """A line per key: the key, of 16 characters at least, and the namespace of its model databases,
    ``default`` without one.  ``None`` lets everybody in.  ``HDSERVE_API_KEYS_FILE`` replaces it."""

    admin_key_file: Path | None = None
    """A file of one line, the key for ``/v1/speculation``, of 16 characters at least; it is closed
    while there is no such file.  ``HDSERVE_ADMIN_KEY_FILE`` replaces it."""

    admin_key: SecretStr | None = None
    """The key itself; with neither, ``/v1/speculation`` is closed.  ``HDSERVE_ADMIN_KEY``
    replaces both.  Ray logs the ``args`` of a Serve config file: name a file there."""

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
    """The number of engine steps of a traced request, from its first, that get a span."""

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
    """A directory, on every node, of statistics databases that the administrator may choose for the
    replicas of a model while they run; ``None`` allows none."""

    drain_timeout_s: float = Field(default=120.0, ge=0)
    """How long a process that is replaced or removed may take to finish the answers it has begun;
    answers not finished by then fail, and the clients only see their connections end.  If
    ``gateway.request_timeout_s`` is not longer than this, every answer ends properly, or with an
    error, before that."""

    @property
    def max_num_open(self) -> int:
        """Most sequences that all models decode or queue."""
        return sum(model.max_num_open for model in self.models)

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if mistakes := [*self._duplicates(), *self._unserved_names(), *self._wrong_sources()]:
            raise Mistakes(mistakes)
        return self

    def _duplicates(self) -> Iterator[tuple[Location, str]]:
        """Yield duplicate names and aliases."""
        known: set[str] = set()
        for number, model in enumerate(self.models):
            places: list[tuple[Location, str]] = [(("name",), model.name)]
            places += [(("aliases", index), alias) for index, alias in enumerate(model.aliases)]
            for place, name in places:
                if name in known:
                    yield ("models", number, *place), f"two models are called {name!r}"
                known.add(name)

    def _unserved_names(self) -> Iterator[tuple[Location, str]]:
        """Yield names that Ray Serve does not accept."""
        for number, model in enumerate(self.models):
            if reason := name_fault(model.name):
                yield ("models", number, "name"), f"{reason}; `aliases` may be anything"

    def _wrong_sources(self) -> Iterator[tuple[Location, str]]:
        """Yield entries of ``draft_from`` that are duplicates, or not another model."""
        known = {model.name for model in self.models}
        for number, model in enumerate(self.models):
            for index, other in enumerate(model.draft_from):
                place = ("models", number, "draft_from", index)
                if other in model.draft_from[:index]:
                    yield place, f"{other!r} is named twice"
                elif other == model.name:
                    yield place, f"{other!r} is the model itself"
                elif other not in known:
                    yield place, f"there is no model {other!r}"
