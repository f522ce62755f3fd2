"""Each fault once, under load: what may be lost is lost with an error, and no token is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.__main__ import record_in_process, record_path
from tests.chaos.faults import FAULTS, by_setting

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(3600)]

NUM_QUESTIONS = 80

ReadRecord = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def read_record(tmp_path_factory: pytest.TempPathFactory) -> ReadRecord:
    """Gives the record of a fault; all faults of its setting are provoked one after the other."""
    out = tmp_path_factory.mktemp("chaos")
    groups = by_setting(FAULTS)

    def read(name: str) -> dict[str, Any]:
        path: Path = record_path(name, 0, out)
        if not path.exists():
            record_in_process(groups[FAULTS[name].setting], 1, out, NUM_QUESTIONS)
        record: dict[str, Any] = json.loads(path.read_text())
        return record

    return read


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name: str, read_record: ReadRecord) -> None:
    """The record says of itself what must not happen and did."""
    obstacle = FAULTS[name].obstacle()
    if obstacle:
        pytest.skip(obstacle)
    record = read_record(name)
    assert record["violations"] == [], record
    assert record["num_right"] > 0
    assert record["recovery_s"] is not None
