"""What several tests of the engine run with."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest
import torch

from tests.engine.async_engines import GateDrafter


@pytest.fixture(autouse=True)
def seeded_numbers() -> None:
    """What a test draws at random is the same whenever it runs, and whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def untraced_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention computes its definition without being traced before each call, which takes most
    of the time and changes no result."""
    flex_attention = import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.fixture
def gate() -> Iterator[GateDrafter]:
    """Open; it is opened in the end, so that no engine waits for it."""
    drafter = GateDrafter()
    yield drafter
    drafter.gate.set()
