"""The plain records that pass between gateway and model server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from deployments.prediction import PredictionCounts
from hdserve.conversation import ChatEnd
from hdserve.core import DEFAULT_NAMESPACE, DraftCounts

THINKING_SWITCHES = ("enable_thinking", "thinking")
REASONING_EFFORT = "reasoning_effort"
THINKING_VARIABLES = (*THINKING_SWITCHES, REASONING_EFFORT)
"""The variables by which chat templates are told whether, and how much, to think."""

VERBOSITY = "verbosity"
TEMPLATE_VARIABLES = (*THINKING_VARIABLES, VERBOSITY)
"""The variables of chat templates that parameters of requests set."""

Prompt = str | tuple[int, ...]
"""A text, or the token ids of one."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a model is asked to do; values a client left out are absent.

    Attributes:
        request_id: also the trace of the request in every log.
        prompts: texts or token ids to continue; empty for a chat.
        messages: the conversation of a chat, as the chat template takes it.
        template_options: further variables of the chat template.
        reasoning_effort: whether, and how much, to think, by the variables that the chat template
            names and ``template_options`` leaves open.
        tools: functions the model may call, as the chat template takes them.
        chat_end: where the text of the conversation ends.
        chat_text: the text of the conversation, where a replica has made it already.
        sampling: fields of ``SamplingParams`` the client set.
        api_defaults: fields of it where neither the client nor the model's configuration says.
        grammar_param: the parameter that asked for the grammar in ``sampling``.
        unheld: the paths of keywords of the request's schemas that the grammar does not hold.
        reasons_first: whether that grammar has room for reasoning before what was asked for; a
            replica says so.
        prompt_logprobs_param: the parameter that asked for the log probabilities of prompts, which
            deltas carry then.
        num_choices: answers per prompt.
        is_streamed: whether nobody collects what deltas carry.
        speculation: fields of ``SpeculationParams`` the client set.
        prediction: the text the client expects in the answer.
        namespace: which model databases the request may read and feed.
        includes_sources: whether deltas carry ``texts`` and ``draft``.
        includes_prompts: whether deltas carry the token ids of prompts.
        trace: the headers that name the gateway's span; empty when the request is not traced.
        session_id: the conversation it belongs to; empty where nobody knows.
        num_body_bytes: of the HTTP body it came in: how much there is to make tokens of.
        heartbeat_s: how long a replica sends nothing before it sends :data:`HEARTBEAT`, or up to
            twice as long; ``None`` sends none.
    """

    request_id: str
    prompts: tuple[Prompt, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    chat_end: ChatEnd = ChatEnd.BEFORE_ANSWER
    chat_text: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    api_defaults: Mapping[str, Any] = field(default_factory=dict)
    grammar_param: str | None = None
    unheld: tuple[str, ...] = ()
    reasons_first: bool = False
    prompt_logprobs_param: str | None = None
    num_choices: int = 1
    is_streamed: bool = False
    speculation: Mapping[str, Any] = field(default_factory=dict)
    prediction: str | None = None
    namespace: str = DEFAULT_NAMESPACE
    includes_sources: bool = False
    includes_prompts: bool = False
    trace: Mapping[str, str] = field(default_factory=dict)
    session_id: str = ""
    num_body_bytes: int = 0
    heartbeat_s: float | None = None

    @property
    def num_prompts(self) -> int:
        """The number of prompts; a chat is one."""
        return max(len(self.prompts), 1)

    @property
    def num_sequences(self) -> int:
        """The number of answers to all prompts."""
        return self.num_prompts * self.num_choices


class Alternative(NamedTuple):
    """One token, as the bytes it stands for, and its log probability."""

    data: bytes
    logprob: float
    token_id: int = -1


class TokenInfo(NamedTuple):
    """The log probabilities of one token; ``data`` are the bytes it stands for, which need not be
    whole characters.  The first token of a prompt has none; its other ones have a rank, too.  One
    that ``is_skipped`` is special, and the text of the answer leaves it out."""

    data: bytes
    logprob: float | None
    top: tuple[Alternative, ...]
    token_id: int = -1
    rank: int | None = None
    is_skipped: bool = False


class DraftedToken(NamedTuple):
    """One node of a draft tree; ``parent`` is the node before it, 0 for those that come first."""

    text: str
    source: int
    parent: int
    is_accepted: bool


class Delta(NamedTuple):
    """What one verification step added to one choice.

    Attributes:
        text: of the answer.
        sources: values of :class:`hdserve.core.Source`, one per token.
        texts: if asked for, one per token; together they are all the model wrote.
        prompt_token_ids: if asked for, in the first delta of all choices of a prompt.
        reasoning: what it thought before its answer, where that is told apart; ``None`` before it
            has begun to.
        draft: if asked for, the tree that was verified, from node 1 on.
        prompt_logprobs: if asked for, one per token of the prompt, in the first delta of one of its
            choices; those of the others do not come before it.
        num_reused_tokens: of the prompt, that were in the KV cache already.
        temperature, top_p: what was sampled with: the request's, else the model's.
        stop_reason: beside ``finish_reason``, the stop string or stop token that the request named
            and that ended the choice.
    """

    prompt_index: int
    choice_index: int
    text: str
    token_ids: tuple[int, ...]
    sources: tuple[int, ...]
    logprobs: tuple[TokenInfo, ...] | None
    finish_reason: str | None
    texts: tuple[str, ...] | None = None
    draft: tuple[DraftedToken, ...] = ()
    prompt_logprobs: tuple[TokenInfo, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    reasoning: str | None = None
    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    stop_reason: str | int | None = None


class Summary(NamedTuple):
    """The last record of an answer.

    Attributes:
        drafts: over all choices.
        replica: which replica answered.
        first_token_s: seconds from the arrival at the replica to the first token of any choice.
        num_reused_tokens: prompt tokens that were in the KV cache already.
        prediction: how much of it came; ``None`` where there was none.
        num_reasoning_tokens: of the output tokens; ``None`` where they are not told apart.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    drafts: DraftCounts
    replica: str
    first_token_s: float | None = None
    num_reused_tokens: int = 0
    prediction: PredictionCounts | None = None
    num_reasoning_tokens: int | None = None


Records = tuple[Delta | Summary, ...]
"""What travels in one message of an answer; the summary is the last record of the last one."""

HEARTBEAT: Records = ()
"""The message by which a replica shows that it is there while it has nothing to send."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a replica says of itself.

    Attributes:
        tool_parser: which reads its calls; ``None`` where none does.
        template_variables: those of :data:`TEMPLATE_VARIABLES` that a chat template of it names.
    """

    name: str
    max_model_len: int
    dtype: str
    device: str
    is_compiled: bool
    is_exact: bool
    num_threads: int
    num_slots: int
    num_kv_tokens: int
    num_running: int
    num_waiting: int
    weight_bytes: int
    drafters: tuple[str, ...]
    tokenizer_fingerprint: str
    tool_parser: str | None = None
    template_variables: tuple[str, ...] = ()
