"""Requests whose right answers are known: each was decoded alone, plainly, before any fault."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
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
    """

    prompt: str
    temperature: float
    seed: int
    max_tokens: int
    text: str
    token_ids: tuple[int, ...]

    def body(self, *, is_streamed: bool) -> dict[str, Any]:
        """The body of a chat completion."""
        return {
            "model": MODEL,
            "messages": [{"role": "user", "content": self.prompt}],
            "temperature": self.temperature,
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            **({"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}),
        }


def read_questions(path: Path, num_questions: int) -> list[Question]:
    """The first ``num_questions``; those that ``path`` lacks are decoded and added to it."""
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    questions = [Question(**{**item, "token_ids": tuple(item["token_ids"])}) for item in known]
    if len(questions) < num_questions:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            for question in _decoded(range(len(questions), num_questions)):
                file.write(json.dumps(asdict(question)) + "\n")
                questions.append(question)
    return questions[:num_questions]


def _decoded(numbers: range) -> Iterator[Question]:
    llm = LLM(MODEL, engine=ENGINE)
    plainly = SpeculationParams(is_enabled=False, is_output_shared=False)
    for number in numbers:
        subject = _SUBJECTS[number % len(_SUBJECTS)]
        prompt = f"{_TASKS[number % len(_TASKS)]} {subject} {number}."
        temperature, max_tokens = 0.8 * (number % 2), 24 + 8 * (number % 9)
        params = llm.sampling(
            temperature=temperature, seed=number, max_tokens=max_tokens, ignore_eos=True
        )
        (answer,) = llm.generate([[{"role": "user", "content": prompt}]], params, plainly)
        yield Question(
            prompt, temperature, number, max_tokens, answer.text, tuple(answer.token_ids)
        )
