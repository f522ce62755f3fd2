"""The nouns every other module uses: a request's parameters, its sequence, its output."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from numbers import Real
from operator import index
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

from hdserve.errors import InvalidRequest

if TYPE_CHECKING:
    from hdserve.tree import DraftTree

MAX_TOP_LOGPROBS = 20
MAX_INTEGER = 2**63 - 1
"""The largest count that a client may name; kernels and traces cannot hold larger integers."""

MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 300_000
"""More than any vocabulary has."""

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 256
"""The longest stop string.  Stop strings are searched for after each token, in the thread that
serves all requests."""

MAX_TOTAL_STOP_CHARACTERS = 4096
"""Of all stop strings of a request: a token of 128 characters, of which each goes on with the
beginning of each stop string, takes 65 us for each."""

DEFAULT_NAMESPACE = "default"
"""The namespace whose generated text a request reads and feeds by default."""


class FinishReason(StrEnum):
    """Why a sequence ended; every sequence ends with exactly one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Source(IntEnum):
    """Where a drafted token came from, highest temporal locality first.

    ``PLAIN`` marks the tokens the model decided without a draft (the bonus of each step).  Drafters
    from outside the project use ``OTHER``.  ``GRAMMAR`` marks those that the form of the answer
    forces.
    """

    PLAIN = 0
    CONTEXT = 1
    MODEL = 2
    STATISTICS = 3
    RECYCLED = 4
    OTHER = 5
    GRAMMAR = 6

    @property
    def label(self) -> str:
        """The name in metrics, responses and configuration."""
        return self.name.lower()


_DRAFTING = tuple(source.label for source in Source if source is not Source.PLAIN)
"""Labels of the sources that guess."""


_INSTEAD: Mapping[str, str] = {
    "n": "for several answers to a prompt, repeat it, with a seed for each",
    "structured_outputs": "write grammar=, with what hdserve.grammar.json_schema(...) makes",
}
"""What to write instead of other libraries' parameters."""


class _Parameters:
    """Parameters that callers pass by keyword; there are no others than the fields.

    Raises:
        InvalidRequest: there is no such field.
    """

    __slots__ = ()

    def __new__(cls, *_values: Any, **chosen: Any) -> Self:
        for name in chosen:
            if name not in cls.__slots__:
                instead = _INSTEAD.get(name, f"there are {', '.join(cls.__slots__)}")
                raise InvalidRequest(f"{cls.__name__} takes no {name!r}: {instead}", name)
        return super().__new__(cls)


@dataclass(frozen=True, slots=True)
class SamplingParams(_Parameters):
    """How the tokens of one request are chosen.

    The defaults are those of the OpenAI API.  ``temperature=0`` is greedy.  ``top_k=0`` and
    ``min_p=0`` are off.  Penalties follow the usual order: repetition penalty over prompt and
    output (Keskar et al. 2019), presence and frequency penalty over the output alone.

    Attributes:
        max_tokens: most tokens to generate; ``None`` means as many as the context leaves.  0 only
            computes the prompt, which needs ``prompt_logprobs``.
        min_tokens: end-of-sequence and stop tokens cannot be chosen before this many tokens, unless
            ``grammar`` allows nothing else.
        allowed_token_ids: the only tokens that may be chosen, including the model's own end token
            only if it is listed; none allows all.
        seed: with the choice index and the position, the only source of randomness.
        logprobs: how many alternatives to report per token; ``None`` reports nothing.
        prompt_logprobs: the same for the tokens of the prompt.
        stop: strings that end the output; they are not part of it unless
            ``include_stop_str_in_output``.
        grammar: what the output must match, made by :mod:`hdserve.grammar`; its end ends the
            output, before ``min_tokens`` too.

    Raises:
        InvalidRequest: a value is out of range or of a wrong type, or there is no such parameter;
            ``param`` names it.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    grammar: str | None = None

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0)
        _check_count("top_k", self.top_k, 0, MAX_INTEGER, of_low="which is off")
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, is_low_open=True)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_count("seed", self.seed, -(2**63), 2**64 - 1)
        _check_count("min_tokens", self.min_tokens, 0, MAX_INTEGER)
        if self.max_tokens is not None:
            fewest = 1 if self.prompt_logprobs is None else 0
            _check_count("max_tokens", self.max_tokens, fewest, MAX_INTEGER)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest("min_tokens is larger than max_tokens", "min_tokens")
        if self.logprobs is not None:
            _check_count("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_count("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
        _check_stop(self.stop)
        _check_collection("stop_token_ids", self.stop_token_ids, "a tuple of token ids")
        _check_biases(self.logit_bias)
        _check_allowed(self.allowed_token_ids)
        if len(self.allowed_token_ids) and self.grammar is not None:
            reason = "allowed_token_ids cannot be combined with structured output (a grammar)"
            raise InvalidRequest(reason, "allowed_token_ids")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            _check_truth(name, getattr(self, name))
        _check_type("grammar", self.grammar, str | None, "what hdserve.grammar makes")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is chosen, without randomness."""
        return self.temperature == 0.0

    @property
    def has_filters(self) -> bool:
        """Whether a sampled token is one of the likeliest: ``top_k``, ``top_p`` or ``min_p``."""
        return bool(self.top_k or self.top_p < 1.0 or self.min_p)

    @property
    def needs_logits_processor(self) -> bool:
        """Whether a choice depends on more than the model's logits: penalties, biases, allowed
        tokens or ``min_tokens``."""
        return bool(self.has_lasting_terms or self.min_tokens)

    @property
    def has_lasting_terms(self) -> bool:
        """Whether it does after ``min_tokens``, too."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or len(self.allowed_token_ids)
        )


def _check_count(name: str, value: int, low: int, high: int, *, of_low: str = "") -> None:
    _check_type(name, value, SupportsIndex, "an integer")
    try:
        _check_range(name, index(value), low, high, of_low=of_low)
    except TypeError as error:
        raise InvalidRequest(f"{name} must be an integer", name) from error


def _check_range(
    name: str,
    value: float,
    low: float,
    high: float,
    *,
    is_low_open: bool = False,
    of_low: str = "",
) -> None:
    _check_type(name, value, Real, "a number")
    if (low < value if is_low_open else low <= value) and value <= high:
        return
    bound = f"{'above' if is_low_open else 'at least'} {low}"
    bound += f", {of_low}," if of_low else ""
    raise InvalidRequest(f"{name} must be {bound} and at most {high}", name)


def _check_truth(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false", name)


def _check_type(name: str, value: object, kind: Any, wanted: str) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):  # Python counts bool as int
        raise InvalidRequest(f"{name} must be {wanted}", name)


def _check_collection(name: str, value: object, wanted: str) -> None:
    """A string is refused: each of its characters would be a member."""
    _check_type(name, value, Collection, wanted)
    if isinstance(value, str | bytes):
        raise InvalidRequest(f"{name} must be {wanted}", name)


def _check_biases(biases: Mapping[int, float]) -> None:
    _check_type("logit_bias", biases, Mapping, "a mapping of token ids")
    if len(biases) > MAX_LOGIT_BIASES:
        raise InvalidRequest(f"at most {MAX_LOGIT_BIASES} biases are allowed", "logit_bias")
    for value in biases.values():
        _check_range("logit_bias", value, -100.0, 100.0)


def _check_allowed(token_ids: Collection[int]) -> None:
    name = "allowed_token_ids"
    _check_collection(name, token_ids, "a tuple of token ids")
    if len(token_ids) > MAX_ALLOWED_TOKEN_IDS:
        raise InvalidRequest(f"at most {MAX_ALLOWED_TOKEN_IDS} tokens can be allowed", name)


def _check_stop(stop: tuple[str, ...] | str) -> None:
    if isinstance(stop, str):
        reason = "stop must be a tuple of strings: of a string each character would end the output"
        raise InvalidRequest(reason, "stop")
    _check_type("stop", stop, Collection, "a tuple of strings")
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"at most {MAX_STOP_STRINGS} stop strings are allowed", "stop")
    for text in stop:
        _check_type("stop", text, str, "a tuple of strings")
    if any(not text for text in stop):
        raise InvalidRequest("a stop string is empty", "stop")
    if any(len(text) > MAX_STOP_CHARACTERS for text in stop):
        reason = f"a stop string has at most {MAX_STOP_CHARACTERS} characters"
        raise InvalidRequest(reason, "stop")
    if sum(map(len, stop)) > MAX_TOTAL_STOP_CHARACTERS:
        reason = f"all stop strings have at most {MAX_TOTAL_STOP_CHARACTERS} characters together"
        raise InvalidRequest(reason, "stop")


@dataclass(frozen=True, slots=True)
class SpeculationParams(_Parameters):
    """How one request is drafted for; nothing here changes its tokens.

    Attributes:
        is_enabled: ``False`` decodes plainly.
        max_draft_tokens: most drafted tokens a step; ``None`` leaves it to the budget.
        databases: labels of the sources that may draft; ``None`` allows all.
        is_output_shared: whether the output may enter the model database.
        prediction: token ids the client expects in the answer (OpenAI ``prediction``).
    """

    is_enabled: bool = True
    max_draft_tokens: int | None = None
    databases: frozenset[str] | None = None
    is_output_shared: bool = True
    prediction: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("is_enabled", "is_output_shared"):
            _check_truth(f"speculation.{name}", getattr(self, name))
        if self.max_draft_tokens is not None:
            name = "speculation.max_draft_tokens"
            _check_count(name, self.max_draft_tokens, 0, MAX_INTEGER)
        name, known = "speculation.databases", f"there are {', '.join(_DRAFTING)}"
        if self.databases is not None:
            _check_collection(name, self.databases, f"a set of labels; {known}")
        for label in self.databases or ():
            if label not in _DRAFTING:
                raise InvalidRequest(f"no source is called {str(label)[:50]!r}; {known}", name)

    def allows(self, source: Source) -> bool:
        """Whether this request may be drafted for from ``source``."""
        return self.databases is None or source.label in self.databases


@dataclass(slots=True)
class DraftCounts:
    """What drafting did for one sequence, or for an engine."""

    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    draft_tokens_by_source: dict[Source, int] = field(default_factory=dict)
    num_drafts_by_accepted: list[int] = field(default_factory=list)
    """Entry ``k``: how many drafts had exactly ``k`` accepted tokens."""

    drafts_by_source: dict[Source, int] = field(default_factory=dict)
    """Drafts that had tokens of the source."""

    accepted_by_depth: dict[Source, list[int]] = field(default_factory=dict)
    """Entry ``k`` of a source: its tokens that were accepted as the ``k``-th after the root, from
    0."""

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens of a step with a draft, the bonus token included; ``None`` without drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def accepted_by_source(self) -> dict[Source, int]:
        """Accepted tokens, at whatever depth."""
        return {source: sum(by_depth) for source, by_depth in self.accepted_by_depth.items()}


@dataclass(slots=True, eq=False)
class PromptScores:
    """The log probabilities of a prompt, computed for one of its choices and shared by all.

    Attributes:
        found: one per token; the first one has none.
    """

    found: tuple[TokenLogprob | None, ...] | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of one request inside the engine.

    Invariant: the last of ``token_ids`` is decided but not yet in the KV cache, so
    ``num_cached_tokens < len(token_ids)``::

        token_ids   p p p p p p o o o o
                    └ prompt ─┘ └output┘
        KV cache    x x x x x x x x x .
                                      └ node 0 of the next draft tree

    Attributes:
        request_id: unique among the running sequences of an engine.
        token_ids: the prompt, then the output so far.
        num_reused_tokens: tokens of the prompt that an earlier sequence had left in the KV cache.
        num_prefilled_tokens: tokens of the prompt that have been in the KV cache; if they are
            computed again, they are not counted again.
        num_unobserved_tokens: the last ones, which drafters have not been told of yet.
        max_total_tokens: at most this many token ids; set by the engine from ``params`` and the
            model's context.
        admitted_s: monotonic time at which the engine gave it a slot; ``None`` while it waits.
        choice_index: which of the ``n`` choices of the request this is.
        namespace: which model databases it may read and feed.
        drafter_state: what drafters keep per sequence, by drafter name.
        recorded_token_ids: an output to repeat instead of the model's choices; for benchmarks of
            models whose weights are not available.
        prompt_scores: shared by the choices of a prompt, which is computed for one of them.
        keyed_prompt: what finds the prompt in the KV cache, shared by its choices; if it is
            missing, the engine's thread makes it.
        grammar_state: how far this sequence has come in ``params.grammar``; if it is missing, the
            engine's thread compiles the grammar.
        allowed_tokens: the tokens of ``params.allowed_token_ids``, shared by the choices of a
            request; if they are missing, the engine's thread reads the ids.
        seen_tokens: of the prompt, for a repetition penalty, shared by its choices; if they are
            missing, the engine's thread collects them.
        is_prompt_checked: whether the prompt's ids are known to be in the vocabulary; if not, the
            engine's thread looks at each.
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    choice_index: int = 0
    namespace: str = DEFAULT_NAMESPACE
    num_prompt_tokens: int = field(init=False)
    num_cached_tokens: int = 0
    num_reused_tokens: int = 0
    num_prefilled_tokens: int = 0
    num_unobserved_tokens: int = 0
    max_total_tokens: int = 0
    admitted_s: float | None = None
    finish_reason: FinishReason | None = None
    counts: DraftCounts = field(default_factory=DraftCounts)
    drafter_state: dict[str, Any] = field(default_factory=dict)
    recorded_token_ids: tuple[int, ...] | None = None
    prompt_scores: PromptScores | None = None
    keyed_prompt: Any = None
    grammar_state: Any = None
    allowed_tokens: Any = None
    seen_tokens: Any = None
    is_prompt_checked: bool = False

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def scores_prompt(self) -> bool:
        """Whether log probabilities of the prompt are wanted that no other choice has computed."""
        is_found = self.prompt_scores is not None and self.prompt_scores.found is not None
        return self.params.prompt_logprobs is not None and not is_found

    @property
    def output_token_ids(self) -> list[int]:
        """The generated token ids so far, as a new list."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Decided tokens whose keys and values are not cached yet; 1 while decoding."""
        return len(self.token_ids) - self.num_cached_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """How many tokens may still be generated."""
        return self.max_total_tokens - len(self.token_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of one token, chosen or of a prompt, and of the likeliest alternatives.

    Values are ``log_softmax`` of the model's raw logits, before penalties and temperature.

    Attributes:
        rank: for a token of a prompt how many tokens are at least as likely, itself included.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one engine step added to one sequence.

    Attributes:
        token_ids: the tokens decided in this step.
        sources: one per token, where it was drafted.
        texts: one per token, the text it makes visible; the text of a token may come with a later
            one, when a character is complete or a possible stop string is decided.
        draft: the tree that was verified.
        logprobs: one per token if they were asked for.
        prompt_logprobs: in the first output, if they were asked for, one per token of the prompt;
            the first token has none.
        finish_reason: set in the last output of a sequence.
        stop_reason: the stop string or the id among ``stop_token_ids`` that ended it, if one did.
        error: the reason when ``finish_reason`` is ``ERROR``.
    """

    sequence: Sequence
    token_ids: tuple[int, ...] = ()
    sources: tuple[Source, ...] = ()
    texts: tuple[str, ...] = ()
    draft: DraftTree | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: Exception | None = None

    @property
    def text(self) -> str:
        """The text that can be shown now."""
        return "".join(self.texts)
