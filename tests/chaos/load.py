"""Clients that ask all the time, some streaming and some not, and compare each answer."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.chaos.questions import Question

TIMEOUT_S = 60.0
_PAUSE_AFTER_FAILURE_S = 0.1


@dataclass(slots=True)
class Outcome:
    """What became of one request.

    Attributes:
        question: its index.
        started_s, ended_s: monotonic.
        kind: ``right``, ``wrong`` (a wrong token was delivered), ``refused`` (429), ``error``
            (the client was told so by an error object), ``broken`` (the connection ended early),
            ``unclear`` (an HTTP error without an error object) or ``hung``.
        detail: status and message of what is not right.
        replica: which one answered.
        num_model_tokens: accepted from the cluster's database.
    """

    question: int
    is_streamed: bool
    started_s: float
    ended_s: float = 0.0
    kind: str = "broken"
    detail: str = ""
    replica: str = ""
    num_model_tokens: int = 0

    @property
    def is_failure(self) -> bool:
        return self.kind not in ("right", "refused")


@dataclass(slots=True)
class _Received:
    """What came of an answer so far."""

    text: str = ""
    is_ended: bool = False
    error: dict[str, Any] | None = None
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Clients:
    """How many there are of each kind."""

    num_streaming: int = 4
    num_plain: int = 2


class Load:
    """Clients of one API key, each in a thread of its own.

    They ask the first half of ``questions`` until they are told to ask the second one; the last
    question is for :meth:`ask` only.

    Attributes:
        outcomes: of the requests that have ended, in the order of their ends.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str,
        questions: Sequence[Question],
        clients: Clients,
    ) -> None:
        self.outcomes: list[Outcome] = []
        self._url = f"{base_url}/v1/chat/completions"
        self._api_key = api_key
        self._questions = questions
        self._half = (len(questions) - 1) // 2
        self._first = 0
        self._num_asked = 0
        self._lock = threading.Lock()
        self._is_stopping = threading.Event()
        self._open: dict[int, Outcome] = {}
        kinds = [True] * clients.num_streaming + [False] * clients.num_plain
        self._threads = [
            threading.Thread(target=self._run, args=(is_streamed,), daemon=True)
            for is_streamed in kinds
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ask nothing more and wait for the answers under way."""
        self._is_stopping.set()
        for thread in self._threads:
            thread.join(2 * TIMEOUT_S)

    def change_questions(self) -> None:
        """Ask the second half of the questions from now on."""
        with self._lock:
            self._first, self._num_asked = self._half, 0

    def num_right(self) -> int:
        return sum(outcome.kind == "right" for outcome in list(self.outcomes))

    def num_open(self) -> int:
        """Requests under way."""
        return len(self._open)

    def replicas(self, since_s: float = 0.0) -> set[str]:
        """The replicas that answered requests that began after ``since_s``."""
        return {
            outcome.replica
            for outcome in list(self.outcomes)
            if outcome.started_s >= since_s and outcome.replica
        }

    def ask(self, client: httpx.Client, index: int, *, is_streamed: bool) -> Outcome:
        """Send one question and judge its answer."""
        question = self._questions[index]
        outcome = Outcome(index, is_streamed, time.monotonic())
        self._open[id(outcome)] = outcome
        received = _Received()
        try:
            self._send(client, question, outcome, received)
        except httpx.TimeoutException as error:
            outcome.kind, outcome.detail = "hung", repr(error)
        except httpx.TransportError as error:
            outcome.kind, outcome.detail = "broken", repr(error)
        finally:
            outcome.ended_s = time.monotonic()
            del self._open[id(outcome)]
        self._judge(question, outcome, received)
        return outcome

    def client(self) -> httpx.Client:
        """For one thread."""
        headers = {"authorization": f"Bearer {self._api_key}"}
        return httpx.Client(timeout=TIMEOUT_S, headers=headers)

    def _run(self, is_streamed: bool) -> None:
        with self.client() as client:
            while not self._is_stopping.is_set():
                with self._lock:
                    index = self._first + self._num_asked % self._half
                    self._num_asked += 1
                outcome = self.ask(client, index, is_streamed=is_streamed)
                self.outcomes.append(outcome)
                if outcome.kind != "right":
                    time.sleep(_PAUSE_AFTER_FAILURE_S)

    def _send(
        self, client: httpx.Client, question: Question, outcome: Outcome, received: _Received
    ) -> None:
        body = question.body(is_streamed=outcome.is_streamed)
        with client.stream("POST", self._url, json=body) as response:
            if response.status_code != 200:
                _read_error(response, outcome)
            elif outcome.is_streamed:
                _read_events(response.iter_lines(), received)
            else:
                answer = json.loads(response.read())
                received.text = answer["choices"][0]["message"]["content"]
                received.metrics, received.is_ended = answer["metrics"], True

    def _judge(self, question: Question, outcome: Outcome, received: _Received) -> None:
        """Decide what kind of outcome it is, from what was received."""
        drafting = received.metrics.get("speculative_decoding", {})
        outcome.replica = received.metrics.get("replica", "")
        outcome.num_model_tokens = drafting.get("accepted_by_source", {}).get("model", 0)
        is_whole = received.is_ended and received.error is None
        is_right = (
            received.text == question.text
            if is_whole
            else question.text.startswith(received.text.rstrip("\ufffd"))
        )
        if not is_right:
            outcome.kind, outcome.detail = "wrong", f"got {received.text!r}, not {question.text!r}"
        elif received.error is not None:
            outcome.kind, outcome.detail = "error", f"in mid-stream: {received.error}"
        elif is_whole:
            outcome.kind = "right"


def _read_error(response: httpx.Response, outcome: Outcome) -> None:
    """A refusal; ``unclear`` unless its body is an error object."""
    text = response.read().decode(errors="replace")
    outcome.detail = f"{response.status_code}: {text[:300]}"
    try:
        is_clear = bool(json.loads(text)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        is_clear = False
    if not is_clear:
        outcome.kind = "unclear"
    else:
        outcome.kind = "refused" if response.status_code == 429 else "error"


def _read_events(lines: Iterable[str], received: _Received) -> None:
    for line in lines:
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            received.is_ended = True
            return
        event = json.loads(line.removeprefix("data: "))
        received.error = event.get("error")
        if received.error:
            return
        received.metrics = event.get("metrics") or received.metrics
        for choice in event["choices"]:
            received.text += choice["delta"].get("content") or ""
