"""Separating the reasoning of the sequences a replica decodes, token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from deployments.generation import GenerationRequest
from deployments.parsers.reasoning_parser import ReasoningParser, Split
from hdserve import core
from hdserve.conversation import ChatEnd
from hdserve.core import StepOutput

if TYPE_CHECKING:
    from hdserve.engine.tokenization.tokenizer import Tokenizer

_MAX_OPENING_TOKENS = 16
"""How many tokens at a prompt's end may be an opening mark and the white space after it."""


class ReasoningReader:
    """Separates reasoning from text in the output of one sequence."""

    def __init__(self, parser: ReasoningParser) -> None:
        self._parser = parser
        self._num_read = 0

    @property
    def num_tokens(self) -> int:
        """The number of reasoning tokens so far, including those of the marks; 0 as long as there
        was no reasoning."""
        return self._num_read if self._parser.has_reasoned else 0

    def read(self, output: StepOutput) -> list[Split]:
        """Return what is certain after ``output``, in the order of the answer: at least one piece;
        in each piece the text follows the reasoning."""
        found = [Split("", "")]
        for text in output.texts:
            self._num_read += not self._parser.is_over
            _add(found, self._parser.push(text))
        if output.finish_reason is not None:
            _add(found, self._parser.finish())
        return found


class ReasoningReaders:
    """Makes the readers of one replica's sequences.

    Args:
        parser: ``None`` makes no readers.
    """

    def __init__(self, parser: type[ReasoningParser] | None, tokenizer: Tokenizer) -> None:
        self._parser = parser
        self._tokenizer = tokenizer
        self._has_special_marks = parser is not None and any(
            self._is_special(mark) for mark in (parser.OPEN, parser.CLOSE)
        )

    def may_delay_grammar(self, request: GenerationRequest) -> bool:
        """Whether the grammar of ``request``, if it has one, may apply to what follows reasoning:
        it is a chat, and the marks can be read in its text."""
        is_held = bool(request.messages) and "grammar" in request.sampling
        is_without = self._has_special_marks and request.sampling.get("skip_special_tokens")
        return self._parser is not None and is_held and not is_without

    def prepared(
        self, request: GenerationRequest, chat_text: Callable[[GenerationRequest], str]
    ) -> GenerationRequest:
        """Return ``request`` with room for reasoning before what a grammar holds, if the prompt
        leaves some, and with special tokens included in its text, if the marks are such tokens and
        the request does not say otherwise.

        Args:
            chat_text: makes the prompt of a chat; called if :meth:`may_delay_grammar`.

        Raises:
            InvalidRequest: the template is wrong.
        """
        if self.may_delay_grammar(request):
            text = chat_text(request)
            request = self._reasoning_first(replace(request, chat_text=text), text)
        if not self._has_special_marks or not _may_reason(request):
            return request
        return replace(request, sampling={"skip_special_tokens": False, **request.sampling})

    def _reasoning_first(self, request: GenerationRequest, prompt: str) -> GenerationRequest:
        assert self._parser is not None
        is_open = _is_open(request, self._parser, prompt)
        if not is_open and _is_over(request, self._parser, prompt):
            return request
        grammar = self._parser.grammar(request.sampling["grammar"], is_open=is_open)
        return replace(
            request, sampling={**request.sampling, "grammar": grammar}, reasons_first=True
        )

    def of(
        self, request: GenerationRequest, sequences: Sequence[core.Sequence]
    ) -> Mapping[str, ReasoningReader]:
        """Return the readers of ``sequences``, which have no output yet, by their ids; none if
        nothing is separated, as when a grammar holds the answer from its first token on."""
        parser = self._parser
        if parser is None or not _may_reason(request):
            return {}
        end = self._tokenizer.decode(sequences[0].token_ids[-_MAX_OPENING_TOKENS:])
        is_open, has_tools = _is_open(request, parser, end), bool(request.tools)
        return {
            seq.request_id: ReasoningReader(parser(is_open=is_open, has_tools=has_tools))
            for seq in sequences
        }

    def _is_special(self, mark: str) -> bool:
        token_ids = self._tokenizer.encode(mark, adds_special_tokens=False)
        return mark not in self._tokenizer.decode(token_ids, skips_special_tokens=True)


def _add(pieces: list[Split], piece: Split) -> None:
    """Append a piece to the last of ``pieces``, or, if it is reasoning that follows text, as a new
    one."""
    last = pieces[-1]
    if last.text and piece.reasoning:
        pieces.append(piece)
    else:
        pieces[-1] = Split(last.reasoning + piece.reasoning, last.text + piece.text)


def _is_open(request: GenerationRequest, parser: type[ReasoningParser], prompt: str) -> bool:
    """Whether the answer begins within reasoning; of ``prompt`` the end will do."""
    return prompt.rstrip().endswith(parser.OPEN) or _goes_on_reasoning(request, parser)


def _is_over(request: GenerationRequest, parser: type[ReasoningParser], prompt: str) -> bool:
    """Whether an answer that does not begin within reasoning has no place for some."""
    goes_on = request.chat_end is ChatEnd.IN_LAST_MESSAGE
    return goes_on or prompt.rstrip().endswith(parser.CLOSE)


def _goes_on_reasoning(request: GenerationRequest, parser: type[ReasoningParser]) -> bool:
    """Whether the answer continues a message that breaks off within the reasoning at its
    beginning."""
    if request.chat_end is not ChatEnd.IN_LAST_MESSAGE:
        return False
    begun: str = request.messages[-1].get("content") or ""
    return begun.lstrip().startswith(parser.OPEN) and parser.CLOSE not in begun


def _may_reason(request: GenerationRequest) -> bool:
    is_held = "grammar" in request.sampling and not request.reasons_first
    return bool(request.messages) and not is_held
