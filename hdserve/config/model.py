"""The configuration of one served model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from hdserve.config.defaults import DefaultsConfig
from hdserve.config.mistakes import Mistakes
from hdserve.config.reserved import CustomResources, Reserved, check_share
from hdserve.config.strict_model import StrictModel, at_home
from hdserve.models import BUNDLED_PREFIX, bundled_models, is_path

Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Device = Literal["auto", "cpu", "cuda"]

ToolParserName = Literal[
    "auto",
    "hermes",
    "llama3_json",
    "mistral",
    "mistral_args",
    "granite",
    "deepseek_v3",
    "deepseek_v31",
    "harmony",
    "qwen3_coder",
    "glm",
    "gemma",
]

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


_MOST_ON_CPU: Final = 16
_MOST_ON_GPU: Final = 31

_FEWEST_CHUNK_TOKENS: Final = 256
_MOST_CHUNK_TOKENS: Final = 2048
_CHUNK_BYTES: Final = 1 << 37
"""Bytes of weights that the tokens of a chunk meet, where more than the fewest do."""

MOST_REQUESTS: Final = 10**6
"""The most that one process may be told to answer, or to let wait: Ray Serve counts in 32 bits."""

_MIN_SEQUENCE_TOKENS: Final = 2
"""A prompt of one token and one generated token."""


class DrafterConfig(StrictModel):
    """One draft source and its options, which the source itself checks."""

    name: str
    """One of the registered sources."""

    options: dict[str, Any] = Field(default_factory=dict)
    """See the options of the sources."""


class DraftingConfig(StrictModel):
    """How drafts are made for one model."""

    drafters: tuple[DrafterConfig, ...] = (DrafterConfig(name="hierarchy"),)
    """Sources whose likeliest guesses make a tree; among equally likely ones, an earlier source
    comes first."""

    max_draft_tokens: int | None = Field(default=None, ge=0, le=256)
    """Most drafted tokens of one sequence in one step; 0 decodes plainly.  Default: 16 on a CPU, 31
    on a GPU, where the 17 rows of 16 drafts and the last token are padded to 32."""

    max_depth: int | None = Field(default=None, ge=1, le=256)
    """Longest path of a draft tree; by default as long as ``max_draft_tokens`` allows."""

    adapts_budget: bool = True
    """Whether the size of the trees follows the measured cost of a forward, down to no drafts."""

    def most_draft_tokens(self, device_type: str) -> int:
        """Return ``max_draft_tokens``, or what it is by default on ``cpu`` or ``cuda``."""
        if self.max_draft_tokens is None:
            return _MOST_ON_CPU if device_type == "cpu" else _MOST_ON_GPU
        return self.max_draft_tokens

    def most_depth(self, num_draft_tokens: int) -> int:
        """Return the longest path of a tree of ``num_draft_tokens``."""
        return num_draft_tokens if self.max_depth is None else min(self.max_depth, num_draft_tokens)

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [drafter.name for drafter in self.drafters]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"drafters names {name!r} twice")
        return self


class EngineConfig(StrictModel):
    """The engine of one replica."""

    dtype: Dtype = "auto"
    """``auto``: bfloat16 where the hardware multiplies it natively, else float32; each replica
    decides for its own machine."""

    device: Device = "auto"
    """``auto``: a GPU if there is one; for a replica that is what ``num_gpus`` reserves."""

    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt and output together; default: what the model was made for."""

    max_num_sequences: int = Field(default=16, ge=1, le=MOST_REQUESTS)
    """Most sequences decoded at a time."""

    max_num_queued: int = Field(default=256, ge=0, le=MOST_REQUESTS)
    """Most sequences that wait for a place in a replica; one more is refused with 429.  While a
    model has no replica, requests wait in each gateway, as many as all replicas take."""

    kv_cache_tokens: int | None = Field(default=None, ge=32)
    """Tokens that the KV cache holds; default: as many as free memory allows, which may be fewer in
    one replica than in another, and so its context shorter.  On a GPU a number that leaves forward
    passes no room is refused."""

    prefill_chunk_tokens: int | None = Field(default=None, ge=1)
    """Most prompt tokens in one step.  Default: 256, and on a CPU up to 2048 for models so small
    that these take a quarter of a second or less."""

    prefill_slowdown: float | None = Field(default=2.0, gt=1.0)
    """How many times as long a decoding step may take when a chunk of a prompt is added to it.  The
    engine measures what prompt tokens cost and cuts the chunk accordingly, to 16 tokens at least.
    With several prompts in progress a step may take that much longer for each.  ``null``: whole
    chunks, however long they take."""

    prefix_caching: bool = True
    """Whether prompts that begin like an earlier sequence of the same namespace reuse its keys and
    values while they are still there."""

    exact: bool | Literal["auto"] = "auto"
    """Whether a row's result may not depend on what else is in a forward, so that drafted output
    equals plain output in every bit; ``auto``: where that costs at most 3 % in decoding and in
    chunks of prompts of 64 and 256 tokens, as on CPUs with products of bfloat16 once a model is
    compiled.  Where no shape of forwards gives it, with ``true`` the model does not start;
    ``is_exact`` of ``GET /v1/models/{name}`` tells."""

    compile: bool | Literal["auto"] = "auto"
    """Whether the model runs as one compiled graph, 1.3 to 2 times as fast on a CPU.  ``true``
    compiles it before the first request.  ``auto`` compiles the model of a server if there are a
    C++ compiler and the headers of Python: on a GPU before the first request, on a CPU in the
    background of the first ones.  With ``exact: true`` on a CPU ``auto`` usually does not compile,
    as answers could change when it is done."""

    num_threads: int | None = Field(default=None, ge=1)
    """Threads of the CPU kernels.  Default: ``num_cpus`` of the model if that is 1 or more, else
    the cores of the machine or container divided by the number of models."""

    def cache_fault(self, max_draft_tokens: int) -> str:
        """Return why ``kv_cache_tokens`` are too few for draft trees of that size; empty if they
        are not."""
        wanted = self.kv_cache_tokens
        if wanted is None or wanted >= fewest_cache_tokens(max_draft_tokens):
            return ""
        return (
            f"a KV cache of {wanted} tokens has no room for one draft tree of "
            f"{max_draft_tokens}; raise kv_cache_tokens, or lower max_draft_tokens"
        )

    def most_prefill_tokens(self, weight_bytes: int, device_type: str) -> int:
        """Return ``prefill_chunk_tokens``, or what it is by default for a model with weights of so
        many bytes on ``cpu`` or ``cuda`` (docs/adr/0037)."""
        if self.prefill_chunk_tokens is not None:
            return self.prefill_chunk_tokens
        if device_type != "cpu":
            return _FEWEST_CHUNK_TOKENS
        fitting = _CHUNK_BYTES // max(1, weight_bytes)
        return min(max(fitting, _FEWEST_CHUNK_TOKENS), _MOST_CHUNK_TOKENS)

    @property
    def max_num_open(self) -> int:
        """Most sequences that are decoded or wait."""
        return self.max_num_sequences + self.max_num_queued


def fewest_cache_tokens(max_draft_tokens: int) -> int:
    """Return how many tokens a KV cache holds at least: one sequence and its drafts."""
    return _MIN_SEQUENCE_TOKENS + max_draft_tokens


class AutoscalingPolicy(StrictModel):
    """Decides how many replicas there are, instead of Ray Serve's own rule."""

    policy_function: str = Field(min_length=1)
    """A function or class, as ``path.to.module:name``."""

    policy_kwargs: dict[str, Any] = Field(default_factory=dict)
    """What a class is made with."""


_TARGET_SHARE = 0.75
"""The share of its slots that a replica of an autoscaling model should use.  Ray Serve's own
default, 2 requests each, would add replicas while the first ones still have room."""


class AutoscalingConfig(StrictModel):
    """Ray Serve's ``autoscaling_config``, in place of ``num_replicas``; without it nothing
    scales."""

    min_replicas: int = Field(default=1, ge=0)
    """Fewest processes; with 0 the first request after a pause waits until a model is loaded."""

    max_replicas: int = Field(default=1, ge=1)
    """Most processes."""

    initial_replicas: int | None = Field(default=None, ge=0)
    """How many there are at first, and again, also under load, whenever a running application gets
    another configuration.  Default: ``min_replicas`` at first, and then the size is kept."""

    target_ongoing_requests: float | None = Field(default=None, gt=0)
    """Target number of requests per replica: with more, replicas are added, with fewer, removed.  A
    request counts once, however many answers it has: where most have many, set 1 or 2.  Default:
    three quarters of ``engine.max_num_sequences``."""

    upscale_delay_s: float = Field(default=30.0, ge=0)
    """How long there must be too few replicas before some are added."""

    downscale_delay_s: float = Field(default=600.0, ge=0)
    """How long there must be too many before some are removed."""

    downscale_to_zero_delay_s: float | None = Field(default=None, ge=0)
    """The same for removing the last one; default: ``downscale_delay_s``."""

    upscaling_factor: float | None = Field(default=None, gt=0)
    """Above 1 it scales up in larger steps, below in smaller ones."""

    downscaling_factor: float | None = Field(default=None, gt=0)
    """Above 1 it scales down in larger steps, below in smaller ones."""

    look_back_period_s: float = Field(default=30.0, gt=0)
    """The time over which requests are counted."""

    aggregation_function: Literal["mean", "max", "min"] = "mean"
    """How the counts over this time are combined."""

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
    """The ``model`` of a request: ASCII without ``#`` and ``%``, for Ray Serve."""

    model: str = Field(min_length=1)
    """A bundled model's name, a local directory or a Hugging Face id."""

    revision: str | None = Field(default=None, min_length=1)
    """The branch, tag or commit of a Hugging Face id."""

    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""

    load_format: Literal["safetensors", "auto"] = "safetensors"
    """``auto`` also loads weights that are pickled, which can run code."""

    aliases: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Further names a request may use."""

    engine: EngineConfig = EngineConfig()
    drafting: DraftingConfig = DraftingConfig()
    defaults: DefaultsConfig = DefaultsConfig()
    statistics: str | None = Field(default="bundled", min_length=1)
    """The directory of a statistics database; ``bundled`` takes what ships for this tokenizer, if
    there is one.  A node without it fetches it from another; if none has it, the largest that the
    cluster has for this tokenizer."""

    draft_from: tuple[str, ...] = ()
    """Other models of the same tokenizer whose generated text may be drafted from, ranked lower."""

    chat_template: Path | None = None
    """A file with the Jinja template that makes prompts of chats, on every node of the model;
    ``None`` takes the model's own."""

    tool_parser: ToolParserName | None = "auto"
    """The format of the model's tool calls; ``auto``: the one its chat template asks for.  If no
    parser reads that, or with ``None``, tools are refused."""

    reasoning_parser: Literal["auto", "think", "mistral", "gemma", "harmony"] | None = None
    """How the model marks its reasoning before it answers a chat; it is then returned separately.
    ``auto``: as its chat template does; ``None`` leaves it in the text."""

    share_output: bool = True
    """Whether finished outputs enter the cluster's model database."""

    show_rejected_drafts: bool = True
    """Whether ``include_sources`` also shows the guesses that the model rejected, which may be text
    of others in the namespace."""

    num_replicas: int | None = Field(default=None, ge=1)
    """How many processes serve this model; default: 1, unless ``autoscaling`` says."""

    autoscaling: AutoscalingConfig | None = None

    session_affinity: bool = True
    """Whether requests of one conversation prefer the replica that served it."""

    num_cpus: Reserved = 0.5
    """CPUs that Ray reserves for a replica.  From one on, this is also its number of threads,
    unless ``engine.num_threads`` is set; below one, it does not affect speed."""

    num_gpus: float | None = Field(default=None, ge=0)
    """GPUs that Ray reserves for a replica: one, or a part of one.  Default: one with ``device:
    cuda`` and none with ``cpu``.  With ``auto`` one, if the cluster has a GPU for each replica, of
    those there are at first, of all models that leave it to this default; else none for any of
    them, which the log says if there are GPUs.  The nodes count that are there when the application
    is built, and with ``serve run deployments:app`` its own machine: set a number where nodes with
    GPUs come later, as with an autoscaler."""

    resources: CustomResources = Field(default_factory=dict)
    """Custom Ray resources of a replica."""

    @property
    def autoscaling_options(self) -> dict[str, Any] | None:
        """Ray Serve's ``autoscaling_config``; ``None`` where the model does not scale."""
        if self.autoscaling is None:
            return None
        default = _TARGET_SHARE * self.engine.max_num_sequences
        chosen = self.autoscaling.model_dump(exclude_none=True)
        return {"target_ongoing_requests": default, **chosen}

    @property
    def first_num_replicas(self) -> int:
        """How many processes serve this model at first."""
        scaling = self.autoscaling
        if scaling is None or scaling.initial_replicas is None:
            return self.min_num_replicas
        return scaling.initial_replicas

    @property
    def min_num_replicas(self) -> int:
        """Fewest processes that serve this model."""
        if self.autoscaling is None:
            return self.num_replicas or 1
        return self.autoscaling.min_replicas

    @property
    def may_sleep(self) -> bool:
        """Whether the model may have no process: asking one would start it, and keep it from
        ending."""
        return self.min_num_replicas == 0

    @property
    def max_num_replicas(self) -> int:
        """Most processes that serve this model."""
        if self.autoscaling is None:
            return self.num_replicas or 1
        return self.autoscaling.max_replicas

    @property
    def max_num_open(self) -> int:
        """Most sequences that all processes of this model decode or queue."""
        return self.engine.max_num_open * self.max_num_replicas

    @field_validator("model")
    @classmethod
    def _check_model(cls, model: str) -> str:
        bundled = bundled_models()
        is_ours = model.startswith(BUNDLED_PREFIX) and "/" not in model
        if is_ours and model not in bundled and not Path(model).exists():
            raise ValueError(f"no bundled model is called {model}: there are {', '.join(bundled)}")
        if not (is_path(model) or _HUB_ID.fullmatch(model) or Path(model).exists()):
            raise ValueError("a directory, a bundled model or OWNER/MODEL is expected")
        return at_home(model)

    @field_validator("statistics")
    @classmethod
    def _check_statistics(cls, statistics: str | None) -> str | None:
        return statistics and at_home(statistics)

    @field_validator("num_gpus")
    @classmethod
    def _check_gpus(cls, num_gpus: float | None) -> float | None:
        if num_gpus is None:
            return None
        if num_gpus > 1:
            raise ValueError("a replica runs on one GPU: 1, or a part of it, is expected")
        return check_share(num_gpus)

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.autoscaling is not None and self.num_replicas is not None:
            raise ValueError("num_replicas and autoscaling exclude each other")
        return self

    @model_validator(mode="after")
    def _check_cache(self) -> Self:
        """Refuse a cache without room for a sequence; ``auto`` may be a CPU, which drafts less."""
        device = "cpu" if self.engine.device == "auto" else self.engine.device
        most = self.drafting.most_draft_tokens(device) if self.drafting.drafters else 0
        if fault := self.engine.cache_fault(most):
            raise Mistakes([(("engine", "kv_cache_tokens"), fault)])
        return self
