"""The sequences of a request: its prompts as token ids, once per choice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from deployments.generation import REASONING_EFFORT, THINKING_SWITCHES, GenerationRequest
from deployments.off_loop import OffLoop
from deployments.replica.answer_logprobs import check_possible_logprobs
from hdserve.core import PromptScores, SamplingParams, Sequence, SpeculationParams
from hdserve.engine.request_check import check_prompt_length, check_token_ids
from hdserve.engine.tokenization.text_beginning import TextBeginning, encode_beginning
from hdserve.errors import GrammarsOverloaded, InvalidRequest

if TYPE_CHECKING:
    from hdserve.engine.host import ModelHost
    from hdserve.engine.structured_output.grammar import GrammarState

MAX_PROMPT_LOGPROBS = 1 << 17
"""The most log probabilities of prompts in one request, over all choices and with alternatives:
some 8 MB of JSON, which as chunks of a stream hold up a gateway for some 0.3 s."""

MAX_PROMPT_IDS = 1 << 20
"""The most token ids of prompts that an answer may show, over all choices: some 6 MB of JSON."""


class SequenceBuilder:
    """Builds what the engine of ``host`` decodes; thread-safe, as tokenizers and grammars are.

    Args:
        max_num_compiling: most requests with a new grammar at a time.
    """

    def __init__(self, host: ModelHost, off_loop: OffLoop, max_num_compiling: int = 64) -> None:
        self._host = host
        self._max_num_compiling = max_num_compiling
        self._num_compiling = 0
        self._tokenizer = host.tokenizer
        self._compiler = ThreadPoolExecutor(1, "hdserve-grammars")
        self._off_loop = off_loop

    async def build_off_loop(self, request: GenerationRequest) -> list[Sequence]:
        """Build as :meth:`build` does, so that what may take long does not hold up the event loop.

        Of a grammar no size says so; a new one is compiled in a thread for this alone, so that
        prompts and grammars that are known wait for none.

        Raises:
            GrammarsOverloaded: too many requests wait for a new grammar.
            InvalidRequest, PromptTooLong: see :meth:`build`.
        """
        grammar = request.sampling.get("grammar")
        if grammar is not None and not self._host.grammars.is_known(grammar):
            await self._compile(grammar, request)
        return await self._off_loop(request.num_body_bytes, self.build, request)

    async def _compile(self, grammar: str, request: GenerationRequest) -> None:
        if self._num_compiling >= self._max_num_compiling:
            raise GrammarsOverloaded("too many requests bring a new grammar; try again later")
        loop = asyncio.get_running_loop()
        self._num_compiling += 1
        try:
            await loop.run_in_executor(self._compiler, self._grammar_state, grammar, request)
        finally:
            self._num_compiling -= 1

    def build(self, request: GenerationRequest) -> list[Sequence]:
        """Build one sequence for each choice of each prompt; their ids end in ``/PROMPT/CHOICE``.

        Raises:
            InvalidRequest: a parameter or a token id is out of range, the template or the grammar
                is wrong, or an answer would have more log probabilities or ids of prompts than it
                may.
            PromptTooLong: a prompt does not fit into the model's context, or into its KV cache.
        """
        params = self._host.params(request.sampling, request.api_defaults)
        self._grammar_state(params.grammar, request)  # a wrong one costs no prompts
        allowed_tokens = self._host.allowed_tokens(params)
        speculation = self._speculation(request)
        prompts = [*self._prompts(request, params)]
        if params.prompt_logprobs is not None:
            num_scored = sum(map(len, prompts)) * request.num_choices
            param = request.prompt_logprobs_param or "logprobs"
            _check_scores(num_scored, 1 + params.prompt_logprobs, param)
        self._check_answer(request, prompts, params)
        # Without a seed of the client, each prompt draws its own: equal ones are asked anew.
        others = [self._host.params(request.sampling, request.api_defaults) for _ in prompts[1:]]
        params_by_prompt = [params, *others]
        own_id = f"{request.request_id}/{uuid4().hex[:8]}"  # a client may use its ids again
        shared = [PromptScores() if request.num_choices > 1 else None for _ in prompts]
        keyed = [self._host.keyed_prompt(token_ids, request.namespace) for token_ids in prompts]
        seen = [self._host.seen_tokens(params, token_ids) for token_ids in prompts]
        return [
            Sequence(
                request_id=f"{own_id}/{prompt_index}/{choice_index}",
                token_ids=list(token_ids),
                params=params_by_prompt[prompt_index],
                speculation=speculation,
                choice_index=choice_index,
                namespace=request.namespace,
                prompt_scores=shared[prompt_index],
                keyed_prompt=keyed[prompt_index],
                grammar_state=self._grammar_state(params.grammar, request),
                allowed_tokens=allowed_tokens,
                seen_tokens=seen[prompt_index],
                is_prompt_checked=True,
            )
            for prompt_index, token_ids in enumerate(prompts)
            for choice_index in range(request.num_choices)
        ]

    def _check_answer(
        self, request: GenerationRequest, prompts: list[tuple[int, ...]], params: SamplingParams
    ) -> None:
        """Check that the answer does not come to hold too much: the log probabilities of as many
        tokens as the client allows, if it says so."""
        if request.includes_prompts and request.prompts:
            _check_prompt_ids(sum(map(len, prompts)) * request.num_choices)
        most = request.sampling.get("max_tokens")
        if params.logprobs is not None and most is not None and not request.is_streamed:
            rooms = [self._host.max_total_tokens - len(token_ids) for token_ids in prompts]
            num_tokens = sum(min(room, most) for room in rooms) * request.num_choices
            check_possible_logprobs(num_tokens, 1 + params.logprobs)

    def _grammar_state(
        self, grammar: str | None, request: GenerationRequest
    ) -> GrammarState | None:
        if grammar is None:
            return None
        try:
            return self._host.grammars.state(grammar)
        except InvalidRequest as error:
            raise type(error)(error.message, request.grammar_param) from error

    def _prompts(
        self, request: GenerationRequest, params: SamplingParams
    ) -> Iterator[tuple[int, ...]]:
        """Yield the prompts, which are checked, as every choice has a copy of them."""
        longest = self._host.max_total_tokens
        param = "messages" if request.messages else "prompt"
        for token_ids, is_whole in self._beginnings(request, longest):
            check_prompt_length(len(token_ids), longest, params, param, is_whole=is_whole)
            check_token_ids(param, token_ids, self._host.model.vocab_size)
            yield tuple(token_ids)

    def _beginnings(self, request: GenerationRequest, num_tokens: int) -> Iterator[TextBeginning]:
        """Yield whole prompts, but for those that have far more than ``num_tokens``."""
        if request.messages:
            text = request.chat_text
            if text is None:
                text = self.chat_text(request)
            yield encode_beginning(self._tokenizer, text, num_tokens, adds_special_tokens=False)
        for prompt in request.prompts:
            if isinstance(prompt, str):
                found = encode_beginning(self._tokenizer, prompt, num_tokens)
                yield found if found.token_ids else self._blank()
            else:
                yield TextBeginning(prompt, is_whole=True)

    def _blank(self) -> TextBeginning:
        """Return what stands for a text without tokens, which the OpenAI API takes as well; nothing
        if the tokenizer has no such token."""
        token_id = self._tokenizer.blank_token_id
        return TextBeginning([] if token_id is None else [token_id], is_whole=True)

    def chat_token_ids(self, request: GenerationRequest) -> list[int]:
        """Return the token ids of a conversation, however long it is.

        Raises:
            InvalidRequest: the template is wrong.
        """
        return self._tokenizer.encode(self.chat_text(request), adds_special_tokens=False)

    def chat_text(self, request: GenerationRequest) -> str:
        """Return the text of a conversation, as the chat template makes it.

        Raises:
            InvalidRequest: the template is wrong.
        """
        options = {**self._effort(request), **request.template_options}
        return self._tokenizer.render_chat(
            request.messages, options, request.tools, request.chat_end
        )

    def _effort(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the variables of the template that say whether, and how much, to think, if the
        request does; where the template has none, the gateway tells the client.

        A switch that the request sets itself, by either name, is left as it is.
        """
        effort, has_tools = request.reasoning_effort, bool(request.tools)
        if effort is None:
            return {}
        values: dict[str, Any] = {REASONING_EFFORT: effort}
        if request.template_options.keys().isdisjoint(THINKING_SWITCHES):
            values |= dict.fromkeys(THINKING_SWITCHES, effort != "none")
        has_variable = self._tokenizer.has_variable
        return {
            name: value for name, value in values.items() if has_variable(name, has_tools=has_tools)
        }

    def _speculation(self, request: GenerationRequest) -> SpeculationParams:
        """Return what all choices are drafted with; of a prediction as much as an answer can
        have."""
        longest = self._host.max_total_tokens
        text = request.prediction or ""
        found = encode_beginning(self._tokenizer, text, longest, adds_special_tokens=False)
        prediction = tuple(found.token_ids[:longest])
        return SpeculationParams(**request.speculation, prediction=prediction)


def _check_scores(num_tokens: int, num_each: int, param: str) -> None:
    """Check that an answer does not have too many log probabilities of prompts."""
    if num_tokens * num_each > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"{num_tokens} tokens of prompts, those of every choice counted, with {num_each} log "
            f"probabilities each are over {MAX_PROMPT_LOGPROBS}; ask for fewer at a time",
            param,
        )


def _check_prompt_ids(num_ids: int) -> None:
    """Check that the choices do not repeat too many token ids of their prompts."""
    if num_ids > MAX_PROMPT_IDS:
        raise InvalidRequest(
            f"return_token_ids: the {num_ids} tokens of prompts, those of every choice counted, "
            f"are over {MAX_PROMPT_IDS}; ask for fewer at a time",
            "return_token_ids",
        )
