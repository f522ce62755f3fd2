"""How much of a stop string a growing text ends with."""

from __future__ import annotations


class StopString:
    """One stop string, and the longest beginning of it that ends the text so far.

    A character costs the same whatever came before (Knuth, Morris and Pratt 1977, "Fast Pattern
    Matching in Strings"): stop strings are searched in the thread that serves everybody.

    Attributes:
        text: of the stop string; not empty.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._num_matched = 0
        self._borders = [0, 0]
        """For each length of a beginning, computed when first needed, the length of the longest
        shorter beginning that it ends with."""

    @property
    def num_open(self) -> int:
        """How many characters at the end of the text may turn out to begin the stop string."""
        is_whole = self._num_matched == len(self.text)
        return self._border(self._num_matched) if is_whole else self._num_matched

    def push(self, piece: str) -> None:
        """Continue the text."""
        if len(piece) >= len(self.text):  # no more than that can begin the stop string
            piece, self._num_matched = piece[-len(self.text) :], 0
        if not self._num_matched and self.text[0] not in piece:
            return
        for character in piece:
            number = self.num_open
            while number and self.text[number] != character:
                number = self._border(number)
            self._num_matched = number + (self.text[number] == character)

    def _border(self, length: int) -> int:
        text, borders = self.text, self._borders
        while len(borders) <= length:
            character, number = text[len(borders) - 1], borders[-1]
            while number and text[number] != character:
                number = borders[number]
            borders.append(number + (text[number] == character))
        return borders[length]
