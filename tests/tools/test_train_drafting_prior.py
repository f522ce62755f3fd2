"""What the prior that ships is trained on, and what it learns where."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from hdserve.bench.replay_files import ReplayRow
from hdserve.databases.statistics_builder import StatisticsBuilder
from hdserve.drafting.arrays import CELL_COUNT, CELL_P, NUM_CELLS
from hdserve.drafting.calibration import Calibration
from hdserve.prompts import PromptRow
from tools.train_drafting_prior import (
    NUM_PROMPTS,
    choose_prompts,
    learn_from_model,
    learn_from_sets,
)

FIRST, SECOND = "first tokenizer", "second tokenizer"


def make_rows(first_token: int) -> list[ReplayRow]:
    """Requests whose tokens are ten ids from ``first_token`` on."""
    text = tuple(first_token + index * index % 10 for index in range(120))
    return [ReplayRow(f"{first_token}/{number}", "all", text[:20], text) for number in range(2)]


def test_what_is_learned_of_tokens_stays_with_their_tokenizer() -> None:
    rows = make_rows(10)
    builder = StatisticsBuilder(FIRST, 64, max_bytes=1 << 20)
    builder.add("corpus", rows[0].response)
    learned = learn_from_sets([(SECOND, make_rows(40)), (FIRST, rows)], FIRST, builder.finish())
    assert learned.token_bias[10:20].any()
    assert not learned.token_bias[40:50].any()


def test_what_is_learned_of_all_tokens_is_handed_on() -> None:
    builder = StatisticsBuilder(FIRST, 64, max_bytes=1 << 20)
    builder.add("corpus", make_rows(10)[0].response)
    statistics = builder.finish()
    alone = learn_from_sets([(FIRST, make_rows(10))], FIRST, statistics)
    after = learn_from_sets([(SECOND, make_rows(40)), (FIRST, make_rows(10))], FIRST, statistics)
    assert not np.array_equal(alone.weights, after.weights)
    assert not np.array_equal(alone.cells, after.cells)


def test_a_model_goes_on_from_what_was_learned() -> None:
    """Not from the prior that ships.  Most kinds of evidence do not come up in few answers."""
    begun = Calibration(0)
    begun.cells[CELL_P], begun.cells[CELL_COUNT] = 0.125, 77.0
    prompts = [
        PromptRow(str(number), "all", f"Tell a story of {number} cats.") for number in range(60)
    ]
    learned = learn_from_model(begun, "hdserve-mini", prompts, 1.0)
    untouched = (learned.cells[CELL_P] == 0.125) & (learned.cells[CELL_COUNT] == 77.0)
    assert 0.9 * NUM_CELLS < np.count_nonzero(untouched) < NUM_CELLS


def write_questions(path: Path, numbers: range) -> Path:
    rows = [{"question_id": number, "turns": [f"What is {number}?"]} for number in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_prompts_are_spread_over_those_that_are_not_measured(tmp_path: Path) -> None:
    questions = write_questions(tmp_path / "questions.jsonl", range(480))
    measured = write_questions(tmp_path / "measured.jsonl", range(0, 480, 8))
    numbers = [int(row.name) for row in choose_prompts(questions, measured)]
    assert len(set(numbers)) == NUM_PROMPTS
    assert all(number % 8 for number in numbers)
    assert numbers[0] < 8
    assert numbers[-1] >= 472


def test_a_short_file_is_asked_whole(tmp_path: Path) -> None:
    questions = write_questions(tmp_path / "questions.jsonl", range(7))
    assert [row.name for row in choose_prompts(questions, None)] == [str(n) for n in range(7)]
