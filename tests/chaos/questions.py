"""Requests whose right answers are known: each was decoded alone, plainly, before any fault."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hdserve import LLM
from hdserve.core import SpeculationParams

MODEL = "hdserve-mini"

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "exact": True,
    "num_threads": 1,
    "max_num_sequences": 8,
    "kv_cache_tokens": 16384,
}
"""Float32, and a row's result does not depend on what else is in a forward."""

_SUBJECTS = ("the number", "a train to platform", "hotel room", "the year", "bus line", "chapter")
_TASKS = ("Tell me about", "Please book", "What do you know of", "Write a short story about")


@dataclass(frozen=True, slots=True)
class Question:
    """One request.

    Attributes:
        text, token_ids: the right answer.
        is_drafted: whether drafts may make it faster.
    """

    prompt: str
    temperature: float
    seed: int
    max_tokens: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    is_drafted: bool = True

    def body(self, *, is_streamed: bool) -> dict[str, Any]:
        """The body of a chat completion."""
        return {
            "model": MODEL,
            "messages": [{"role": "user", "content": self.prompt}],
            "temperature": self.temperature,
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "speculation": {"enabled": self.is_drafted},
            **({"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}),
        }


def read_questions(path: Path, num_questions: int) -> list[Question]:
    """The first ``num_questions``, and as the last one :func:`_long_question`.

    Those that ``path`` lacks are decoded and added to it.
    """
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    questions = [Question(**{**item, "token_ids": tuple(item["token_ids"])}) for item in known]
    if len(questions) <= num_questions:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            for question in _answered(len(questions), num_questions + 1):
                file.write(json.dumps(asdict(question)) + "\n")
                questions.append(question)
    return [*questions[1 : num_questions + 1], questions[0]]


def _answered(first: int, end: int) -> Iterator[Question]:
    """Number 0 is the long one."""
    llm = LLM(MODEL, engine=ENGINE)
    plainly = SpeculationParams(is_enabled=False, is_output_shared=False)
    for number in range(first, end):
        question = _question(number) if number else _long_question()
        params = llm.sampling(
            temperature=question.temperature,
            seed=question.seed,
            max_tokens=question.max_tokens,
            ignore_eos=True,
        )
        messages = [{"role": "user", "content": question.prompt}]
        (answer,) = llm.generate([messages], params, plainly)
        yield replace(question, text=answer.text, token_ids=tuple(answer.token_ids))


def _question(number: int) -> Question:
    prompt = f"{_TASKS[number % len(_TASKS)]} {_SUBJECTS[number % len(_SUBJECTS)]} {number}."
    return Question(prompt, 0.8 * (number % 2), number, 24 + 8 * (number % 9))


def _long_question() -> Question:
    """Its answer takes longer than Ray Serve lets requests end by default."""
    return Question("Write a long story.", 0.8, 0, 1000, is_drafted=False)
