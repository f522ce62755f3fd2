"""What a load client saw of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise


class Outcome(StrEnum):
    """How a request ended; each one ends in exactly one of these ways."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    """The server was full and said so: status 429."""

    FAILED = "failed"


@dataclass(slots=True)
class RequestRecord:
    """One request.  Times in seconds of the monotonic clock.

    Attributes:
        name: of the prompt.
        started_s: from when its times count: when it was sent, or was due.
        sent_s: when it was sent.
        outcome: ``None`` while it runs.
        chunk_times_s: arrivals of the chunks with text.
        num_output_tokens: from the server; if it does not say, the number of chunks.
        has_usage: whether the server said.
        engine_ttft_s: from the arrival at the engine to the first token, if the server says.
        error: what went wrong; for a rejected request what the server said.
        retry_after_s: how long a rejected request was told to wait.
        is_connection_kept: whether it reused a connection of an earlier request.
        is_sent_again: whether that connection was closed before an answer began, so that it was
            sent again over a new one.
    """

    name: str
    started_s: float
    outcome: Outcome | None = None
    ended_s: float = 0.0
    chunk_times_s: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    has_usage: bool = False
    engine_ttft_s: float | None = None
    status: int | None = None
    error: str = ""
    retry_after_s: float = 0.0
    is_connection_kept: bool = False
    is_sent_again: bool = False
    sent_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.sent_s = self.started_s

    @property
    def ttft_s(self) -> float:
        """Time to the first text; for an answer without text, to its end."""
        first_s = self.chunk_times_s[0] if self.chunk_times_s else self.ended_s
        return first_s - self.started_s

    @property
    def e2el_s(self) -> float:
        """Time to the end."""
        return self.ended_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; ``None`` if there is no second one."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        """Gaps between chunks."""
        return [later - earlier for earlier, later in pairwise(self.chunk_times_s)]
