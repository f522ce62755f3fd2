"""Token ids to text, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from hdserve.core import SamplingParams
from hdserve.engine.stop_string import StopString

_MAX_CHARACTER_BYTES = 4
_MAX_UNDECODED_TOKENS = 16
"""The most tokens of an unfinished character: after as many it will not become one."""

_MAX_PROMPT_TOKENS = 24
"""How many tokens at the end of a prompt are searched for text."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The text of one sequence's output as it grows.

    Never shows half a character, nor text that may turn out to begin a stop string.

    Args:
        backend: the ``tokenizers.Tokenizer`` of the model.
        prompt: what the output follows: many decoders drop the space that a text begins with,
            which is none where the output goes on.
    """

    def __init__(self, backend: Any, params: SamplingParams, prompt: Sequence[int] = ()) -> None:
        self._backend = backend
        self._skips_special_tokens = params.skip_special_tokens
        self._stream = self._stream_behind(prompt)
        self._stop = [StopString(text) for text in params.stop]
        self._includes_stop = params.include_stop_str_in_output
        self._last_decoded = [*prompt[-_MAX_PROMPT_TOKENS:]]
        """The tokens of the last text."""
        self._undecoded: list[int] = []
        self._held = ""
        self._num_deaf = 0
        """How many of the first characters that are held no stop string may end in."""
        self.found_stop: str | None = None
        """The stop string that ended the text."""

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.found_stop is not None

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Add a token; what can be shown now.  Sets ``found_stop`` when a stop string ends with it
        and ``may_stop``, after which nothing may be pushed."""
        assert not self.is_stopped
        self._undecoded.append(token_id)
        piece = self._step(token_id)
        if piece is not None:
            self._last_decoded, self._undecoded = self._undecoded, []
        elif len(self._undecoded) <= _MAX_UNDECODED_TOKENS:
            return ""
        elif self._decode(self._undecoded):
            piece = self._give_up()
        else:  # special tokens that are skipped, all of which a stream would decode each time
            self._undecoded.clear()
            self._stream = self._stream_behind(self._last_decoded)
            return ""
        if not self._stop:
            return piece
        return self._take(piece, may_stop)

    def finish(self, *, may_stop: bool = True) -> str:
        """What was held back: the output is complete.  A character that was cut off shows as the
        replacement character; what stands before it may end with a stop string."""
        shown = ""
        if self._undecoded and not self.is_stopped:
            shown = self._take(self._decode(self._undecoded), may_stop)
        text, self._held = shown + self._held, ""
        return text

    def _stream_behind(self, token_ids: Sequence[int]) -> DecodeStream:
        """A stream that goes on after the last text of ``token_ids``; a character that they leave
        unfinished is none."""
        end, text = list[int](), ""
        for number in range(1, min(len(token_ids), _MAX_PROMPT_TOKENS) + 1):
            end = [*token_ids[-number:]]
            text = self._decode(end)
            if text and not text.endswith(_REPLACEMENT):
                break
        begun = [] if text.endswith(_REPLACEMENT) else end
        return DecodeStream(begun, self._skips_special_tokens)

    def _step(self, token_id: int) -> str | None:
        """The text that is complete with ``token_id``; ``None`` when there is none.

        After bytes that are no UTF-8, decoders with byte fallback take back characters that were
        complete before, which the stream refuses; the text then goes on after what was shown.
        """
        try:
            piece: str | None = self._stream.step(self._backend, token_id)
        except Exception:  # the library raises nothing more specific
            self._stream = DecodeStream(self._undecoded, self._skips_special_tokens)
            return self._decode(self._undecoded)
        return piece

    def _give_up(self) -> str:
        """What no token that comes can make a character any more: each would be decoded with all of
        it.  The tokens of one that may have begun stay: the text is the same with the cut before
        them."""
        tokens, whole = self._undecoded, self._decode(self._undecoded)
        num_kept = next(
            (
                number
                for number in range(1, _MAX_CHARACTER_BYTES)
                if self._decode(tokens[:-number]) + self._decode(tokens[-number:]) == whole
            ),
            _MAX_CHARACTER_BYTES,
        )
        self._last_decoded, self._undecoded = tokens[:-num_kept], tokens[-num_kept:]
        self._stream = DecodeStream(skip_special_tokens=self._skips_special_tokens)
        for token_id in self._undecoded:
            self._stream.step(self._backend, token_id)
        return self._decode(tokens[:-num_kept])

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=self._skips_special_tokens)
        return text

    def _take(self, piece: str, may_stop: bool) -> str:
        self._held += piece
        found = self._find_stop() if may_stop else None
        if found is not None:
            at, stop = found
            self.found_stop = stop
            shown = self._held[: at + len(stop)] if self._includes_stop else self._held[:at]
            self._held = ""
            return shown
        for each in self._stop:
            each.push(piece)
        num_held = max((each.num_open for each in self._stop), default=0)
        split = len(self._held) - num_held
        shown, self._held = self._held[:split], self._held[split:]
        self._num_deaf = max(0, self._num_deaf - split) if may_stop else num_held
        return shown

    def _find_stop(self) -> tuple[int, str] | None:
        """Where the first stop string begins, and which it is."""
        places = (
            (self._held.find(each.text, max(0, self._num_deaf - len(each.text) + 1)), each.text)
            for each in self._stop
        )
        return min(((at, text) for at, text in places if at >= 0), default=None)
