"""Requests whose right answers are known: each was decoded alone, plainly, before any fault."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

from hdserve import LLM
from hdserve.core import SpeculationParams, TokenLogprob
from hdserve.noise import exponential, noise_word, position_key, sequence_key

MODEL = "hdserve-mini"

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "exact": True,
    "num_threads": 1,
    "max_num_sequences": 8,
    "kv_cache_tokens": 16384,
}
"""Float32, and a row's result does not depend on what else is in a forward."""

TOP_K = 4
MIN_MARGIN = 1e-4
"""Rounding changes log probabilities by less than a tenth of it."""

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
            "top_k": TOP_K,
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "speculation": {"enabled": self.is_drafted},
            **({"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}),
        }


def read_questions(path: Path, num_questions: int) -> list[Question]:
    """So many questions, and as the last one a long one.

    Those that ``path`` lacks are decoded and added to it.
    """
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    questions = [Question(**{**item, "token_ids": tuple(item["token_ids"])}) for item in known]
    if len(questions) <= num_questions:
        path.parent.mkdir(parents=True, exist_ok=True)
        first = questions[-1].seed + 1 if questions else 0
        with path.open("a") as file:
            for question in islice(_answered(first), num_questions + 1 - len(questions)):
                file.write(json.dumps(asdict(question)) + "\n")
                questions.append(question)
    return [*questions[1 : num_questions + 1], questions[0]]


def _answered(first: int) -> Iterator[Question]:
    """Questions with their answers, without those that rounding might change: exact mode is a
    sample of shapes, and one flipped token in 200,000 would look like a fault's work."""
    llm = LLM(MODEL, engine=ENGINE)
    plainly = SpeculationParams(is_enabled=False, is_output_shared=False)
    for number in count(first):
        question = _question(number) if number else _long_question()
        params = llm.sampling(
            temperature=question.temperature,
            top_k=TOP_K,
            seed=question.seed,
            max_tokens=question.max_tokens,
            ignore_eos=True,
            logprobs=TOP_K + 1,
        )
        messages = [{"role": "user", "content": question.prompt}]
        outputs = list(llm.stream(messages, params, plainly))
        first_position = outputs[0].sequence.num_prompt_tokens
        logprobs = [item for output in outputs for item in output.logprobs or ()]
        margins = (
            _margin(question, first_position + index, logprob)
            for index, logprob in enumerate(logprobs)
        )
        if not number or min(margins) >= MIN_MARGIN:
            text = "".join(output.text for output in outputs)
            token_ids = tuple(outputs[0].sequence.output_token_ids)
            yield replace(question, text=text, token_ids=token_ids)


def _margin(question: Question, position: int, logprob: TokenLogprob) -> float:
    """How far a choice is from another one, in log probability."""
    values = [value for _, value in logprob.top]
    temperature = question.temperature
    if not temperature:
        return values[0] - values[1]
    key = position_key(sequence_key(question.seed, 0), position)
    arrivals = sorted(
        math.log(exponential(noise_word(key, token))) * temperature - value
        for token, value in logprob.top[:-1]
    )
    return min(values[-2] - values[-1], arrivals[1] - arrivals[0])


def _question(number: int) -> Question:
    prompt = f"{_TASKS[number % len(_TASKS)]} {_SUBJECTS[number % len(_SUBJECTS)]} {number}."
    return Question(prompt, 0.8 * (number % 2), number, 24 + 8 * (number % 9))


def _long_question() -> Question:
    """Its answer takes longer than Ray Serve lets requests end by default."""
    return Question("Write a long story.", 0.0, 0, 1000, is_drafted=False)
