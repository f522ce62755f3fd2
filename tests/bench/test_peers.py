"""Engines beside each other: each in a process of its own, stopped while others decode."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peer_process import PeerProcess
from benchmarks.peers import BASELINE, CONTENDERS, PLAIN, chosen, deal, main, run_rounds, summary
from hdserve.errors import ConfigError
from hdserve.prompts import PromptRow
from tests.waiting import eventually

PROMPTS = [[5, 9, 11, 5, 9], [7, 8, 9, 10]]


def start(log: Path, **options: Any) -> PeerProcess:
    engine = {"compile": False, "max_num_sequences": 2, "num_threads": 1}
    model = {"model": "hdserve-mini", "engine": engine, "drafting": {"adapts_budget": False}}
    options = {**model, "is_drafting": True, **options}
    return PeerProcess(Path(sys.executable), "hdserve", options, log)


def are_stopped() -> list[bool]:
    """Whether each engine of this process, of those that are there, stands still."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # others may end meanwhile
            state, parent = status.read_text().rpartition(")")[2].split()[:2]
            command = (status.parent / "cmdline").read_bytes()
            if int(parent) == os.getpid() and b"peer_engine" in command:
                found.append(state == "T")
    return found


def test_all_engines_answer_every_set_and_stand_still_meanwhile(tmp_path: Path) -> None:
    with (
        start(tmp_path / "plain", is_drafting=False) as plain,
        start(tmp_path / "drafting") as drafting,
    ):
        assert plain.version == drafting.version == "hdserve"
        runs = run_rounds({"plain": plain, "drafting": drafting}, [PROMPTS, PROMPTS], 12)
        eventually(lambda: are_stopped() == [True, True])
    assert not are_stopped()
    for found in runs.values():  # the first set warms up
        assert [len(output) for run in found for output in run["outputs"]] == [12, 12]
        assert found[0]["seconds"] > 0.0
    assert runs["plain"][0]["outputs"] == runs["drafting"][0]["outputs"]


def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"), start(tmp_path / "log", model="/x"):
        pass
    assert not are_stopped()


def test_sets_are_disjoint_and_have_some_of_every_kind() -> None:
    rows = [PromptRow(str(number), "all", f"question {number}") for number in range(7)]
    sets = deal(rows, 3)
    assert [[row.name for row in part] for part in sets] == [
        ["0", "3", "6"],
        ["1", "4"],
        ["2", "5"],
    ]
    with pytest.raises(ConfigError, match="8 sets take more than 7 prompts"):
        deal(rows, 8)


@pytest.mark.parametrize(
    ("contenders", "reason"),
    [
        ("vllm,hdserv", "'hdserv' is none of vllm, vllm-ngram, "),
        ("hdserve-plain,hdserve", "vllm is needed for comparison"),
        ("vllm,hdserve", "hdserve-plain is needed for comparison"),
    ],
)
def test_what_could_not_be_compared_is_told_at_the_start(contenders: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        main(Path("/no/python"), Path("/no/prompts"), contenders=contenders)


def test_contenders_are_those_that_are_named() -> None:
    assert chosen("vllm,vllm-suffix,vllm") == ["vllm", "vllm-suffix"]
    assert chosen("vllm,hdserve-plain") == ["vllm", "hdserve-plain"]
    assert chosen(",".join(CONTENDERS)) == [*CONTENDERS]


def test_ratios_are_of_one_round_and_answers_of_the_same_engine_are_compared() -> None:
    def run(seconds: float, *outputs: list[int]) -> dict[str, Any]:
        return {"seconds": seconds, "outputs": list(outputs)}

    runs = {
        BASELINE: [run(4.0, [1, 2]), run(8.0, [3, 4])],
        "vllm-ngram": [run(2.0, [1, 2]), run(8.0, [3, 5])],
        PLAIN: [run(2.0, [1, 9]), run(2.0, [3, 9])],
        "hdserve": [run(1.0, [1, 9]), run(1.0, [3, 9])],
    }
    found = {row["contender"]: row for row in summary(runs)}
    assert found["vllm-ngram"]["ratio_to_vllm"] == 1.5
    assert found["vllm-ngram"]["share_as_without_drafts"] == 0.5
    assert (found["hdserve"]["ratio_low"], found["hdserve"]["ratio_high"]) == (4.0, 8.0)
    assert found["hdserve"]["share_as_without_drafts"] == 1.0
    assert found["hdserve"]["tokens_per_s"] == 2.0
