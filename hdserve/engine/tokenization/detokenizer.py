"""Token ids to text, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from hdserve.core import SamplingParams
from hdserve.engine.tokenization.stop_string import StopString

_MAX_CHARACTER_BYTES = 4
_MAX_UNDECODED_TOKENS = 16
"""The most tokens of an unfinished character: after more it will never become one."""

_MAX_PROMPT_TOKENS = 24
"""How many tokens at the end of a prompt are searched for text."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The text of one sequence's output as it grows.

    Never shows half a character, nor text that may turn out to begin a stop string.

    Args:
        backend: the ``tokenizers.Tokenizer`` of the model.
        prompt: what the output follows: many decoders drop a space at the beginning of a text,
            which must be kept where the output continues another one.
    """

    def __init__(self, backend: Any, params: SamplingParams, prompt: Sequence[int] = ()) -> None:
        self._backend = backend
        self._skips_special_tokens = params.skip_special_tokens
        self._stream = self._stream_behind(prompt)
        self._stop = [StopString(text) for text in params.stop]
        self._includes_stop = params.include_stop_str_in_output
        self._last_decoded = [*prompt[-_MAX_PROMPT_TOKENS:]]
        """The tokens of the last complete text."""
        self._undecoded: list[int] = []
        self._held = ""
        self._num_deaf = 0
        """No stop string may end within this many of the first held characters."""
        self.found_stop: str | None = None
        """The stop string that ended the text."""

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.found_stop is not None

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Add a token; return the text that can be shown now.  If ``may_stop`` and a stop string
        ends with it, sets ``found_stop``, after which nothing may be pushed."""
        assert not self.is_stopped
        self._undecoded.append(token_id)
        piece = self._step(token_id)
        if piece is not None:
            self._last_decoded, self._undecoded = self._undecoded, []
        elif len(self._undecoded) <= _MAX_UNDECODED_TOKENS:
            return ""
        elif self._decode(self._undecoded):
            piece = self._give_up()
        else:  # special tokens that are skipped; a stream would decode all of them each time
            self._undecoded.clear()
            self._stream = self._stream_behind(self._last_decoded)
            return ""
        if not self._stop:
            return piece
        return self._take(piece, may_stop)

    def finish(self, *, may_stop: bool = True) -> str:
        """Return the text held back, as the output is complete.  A character that was cut off
        becomes the replacement character; the text before it may end with a stop string."""
        shown = ""
        if self._undecoded and not self.is_stopped:
            shown = self._take(self._decode(self._undecoded), may_stop)
        text, self._held = shown + self._held, ""
        return text

    def _stream_behind(self, token_ids: Sequence[int]) -> DecodeStream:
        """A stream that continues after the last text of ``token_ids``; one that begins anew if
        they end with an unfinished character."""
        end, text = list[int](), ""
        for number in range(1, min(len(token_ids), _MAX_PROMPT_TOKENS) + 1):
            end = [*token_ids[-number:]]
            text = self._decode(end)
            if text and not text.endswith(_REPLACEMENT):
                break
        begun = [] if text.endswith(_REPLACEMENT) else end
        return DecodeStream(begun, self._skips_special_tokens)

    def _step(self, token_id: int) -> str | None:
        """The text that ``token_id`` completes; ``None`` if there is none.

        After invalid UTF-8, decoders with byte fallback take back characters that were already
        complete, which the stream refuses; the text then continues after what was shown.
        """
        try:
            piece: str | None = self._stream.step(self._backend, token_id)
        except Exception:  # the library raises nothing more specific
            self._stream = DecodeStream(self._undecoded, self._skips_special_tokens)
            return self._decode(self._undecoded)
        return piece

    def _give_up(self) -> str:
        """Return the text of undecoded tokens that no later token can complete; else every later
        token would be decoded with all of them.  The last tokens stay if they may begin a
        character: as many as can be cut off without changing the text."""
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
        """Where the first stop string begins, and which one it is."""
        places = (
            (self._held.find(each.text, max(0, self._num_deaf - len(each.text) + 1)), each.text)
            for each in self._stop
        )
        return min(((at, text) for at, text in places if at >= 0), default=None)
