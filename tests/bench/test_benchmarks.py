"""Scripts of ``benchmarks``: what is wrong shows before hours of measuring, not after them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import drafting_latency, drafting_results, sampled, statistics_build
from benchmarks.drafting_traffic import LongestMatch
from benchmarks.serving_load import report, too_much_growth
from hdserve.bench.environment import commit
from hdserve.bench.replay import ReplayMode
from hdserve.bench.replay_files import ReplayRow
from hdserve.errors import HdserveError
from hdserve.tree import DraftTree
from tests.engines import make_sequence


@pytest.mark.parametrize(
    ("main", "options"),
    [
        (statistics_build.main, ("--data", "none")),
        (drafting_latency.main, ("--data", "none")),
        (sampled.main, ("--prompts", "none")),
    ],
    ids=lambda value: getattr(value, "__module__", ""),
)
def test_a_place_for_results_is_made_first(
    main: Callable[[], None],
    options: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "not" / "yet" / "out.json"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmark", *options, "--out", str(out)])
    with pytest.raises(HdserveError):  # there is nothing to measure
        main()
    assert out.parent.is_dir()


@pytest.mark.parametrize(
    ("options", "missing"),
    [(("plot",), "--data"), (("table",), "--data"), (("plot", "--data", "x"), "--images")],
)
def test_drafting_results_say_what_they_need(
    options: tuple[str, ...],
    missing: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["drafting_results", *options, "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit):
        drafting_results.main()
    assert missing in capsys.readouterr().err.splitlines()[-1]


def test_figures_of_another_commit_are_measured_again(tmp_path: Path) -> None:
    """Those that do not say of which they are, too."""
    rows = [ReplayRow("a", "all", (5, 6, 7) * 4, (5, 6, 7) * 8)]
    recorded = drafting_results.RecordedSet("set", rows, [])
    setting = drafting_results.Setting(ReplayMode.COLD, drafter="context")

    def figures(**changes: object) -> dict[str, Any]:
        """Those of a run that finds the figures of the last one with these changes."""
        for path in tmp_path.iterdir():
            path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        drafting_results.run(tmp_path, recorded, None, setting)
        (path,) = tmp_path.iterdir()
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    first = figures()
    assert first["commit"] == commit()
    assert figures(set="kept")["set"] == "kept"
    for other in ("0123abc", None):
        assert figures(set="old", commit=other)["set"] == "set"


def test_a_process_that_died_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """It has no memory to compare; others of its name have."""

    def process(growth: float | None, *mib: float) -> dict[str, Any]:
        sizes = {"rss_mib": list(mib), "private_mib": list(mib)}
        growths = {"rss_growth": growth, "private_growth": growth}
        return {"name": "replica", "is_hdserve": True, **sizes, **growths}

    processes = [process(0.2, 100.0, 120.0), process(None), process(0.01, 100.0, 101.0)]
    problems = too_much_growth(processes)
    assert problems == ["replica was not there in the second half", "replica grew by 20.0%"]
    names = ("sent", "right", "rejected", "abandoned", "wrong", "failed", "output_tokens_per_s")
    report({**dict.fromkeys(names, 0), "processes": processes, "problems": problems})
    shown = capsys.readouterr().out
    assert "+20.0%" in shown
    assert "+1.0%" in shown


@pytest.mark.parametrize(
    ("prompt", "answered", "wanted"),
    [
        ([5, 6, 7, 8, 5, 6], [], [7, 8, 5, 6]),  # the request's own end matches itself
        ([7, 8, 5, 6], [4, 5, 6, 9], [9]),  # it does not hide a shorter match elsewhere
        ([3, 5, 6, 7, 5, 6], [4, 5, 6, 9], [9]),  # all text where both match as much
        ([4, 5, 6, 7, 4, 5, 6], [5, 6, 9], [7, 4, 5, 6]),
    ],
)
def test_the_rule_of_suffix_decoding(
    prompt: list[int], answered: list[int], wanted: list[int]
) -> None:
    drafter = LongestMatch([ReplayRow("a", "all", (1,), tuple(answered))])
    seq = make_sequence("a", prompt)
    drafter.start(seq)
    tree = DraftTree(prompt[-1], 16)
    drafter.propose(seq, tree)
    assert tree.token_ids[1:] == wanted
