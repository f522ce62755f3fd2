"""The KV cache leaves room for what else needs memory, and says what takes it where it cannot."""

from __future__ import annotations

from typing import Any

import pytest

from hdserve.config import EngineConfig, ModelConfig
from hdserve.engine.kv_cache.segments import align
from hdserve.engine.loading import cache_size
from hdserve.engine.loading.cache_size import (
    FreeMemory,
    forward_bytes,
    make_cache,
    num_cache_tokens,
)
from hdserve.engine.loading.loader import prepare_model
from hdserve.errors import ConfigError
from tests.models import make_model

MODEL = prepare_model(make_model(), EngineConfig())
BYTES_PER_TOKEN = MODEL.kv_shape.bytes_per_token(MODEL.dtype)
MAX_DRAFT_TOKENS = 31
NEEDED = forward_bytes(MODEL, 16, MAX_DRAFT_TOKENS)
"""What forwards of 16 sequences need on a GPU."""


def on_gpu(num_tokens: int) -> FreeMemory:
    """A GPU with room for so many tokens beside forwards."""
    return FreeMemory("the GPU", NEEDED + num_tokens * BYTES_PER_TOKEN, 0.85, NEEDED)


def size(memory: FreeMemory, **engine: Any) -> int:
    return num_cache_tokens(EngineConfig(**engine), MODEL, MAX_DRAFT_TOKENS, memory)


def test_the_cache_takes_what_forwards_leave() -> None:
    """As many tokens as 16 sequences can have, at most."""
    assert size(on_gpu(100)) == 100
    assert size(on_gpu(1 << 22)) == 16 * align(MODEL.max_model_len + MAX_DRAFT_TOKENS)


def test_on_a_cpu_it_takes_a_share() -> None:
    """What forwards need there is not known."""
    memory = FreeMemory("memory", 1000 * BYTES_PER_TOKEN, 0.15)
    assert size(memory) == 150
    assert size(memory, kv_cache_tokens=1 << 20) == 1 << 20


def test_more_than_there_is_on_a_cpu_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """The system would end the process, and say nothing."""
    memory = FreeMemory("memory", 1000 * BYTES_PER_TOKEN, 0.15)
    size(memory, kv_cache_tokens=1000)
    assert caplog.text == ""
    size(memory, kv_cache_tokens=1001)
    told = "a KV cache of 1001 tokens takes 0.0 GiB, and 0.0 GiB of memory are free: lower kv_cache"
    assert told in caplog.text


@pytest.mark.parametrize("num_tokens", [None, 64])
def test_a_context_that_ends_with_the_cache_is_told(
    num_tokens: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With what else the limit depends on, if the configuration does not say it."""
    memory = FreeMemory("memory", 64 * BYTES_PER_TOKEN, 1.0)
    monkeypatch.setattr(cache_size, "_free_memory", lambda *_: memory)
    config = ModelConfig(name="m", model="m", engine=EngineConfig(kv_cache_tokens=num_tokens))
    make_cache(config, MODEL, MAX_DRAFT_TOKENS)
    assert "limits the context to 33 tokens" in caplog.text
    assert ("unless kv_cache_tokens is set" in caplog.text) == (num_tokens is None)


@pytest.mark.parametrize("num_bytes", [0.0, NEEDED / 2, float(NEEDED)])
def test_a_gpu_without_room_says_what_takes_it(num_bytes: float) -> None:
    """And names no setting that was not made."""
    memory = FreeMemory("this engine's share of the GPU", num_bytes, 0.85, NEEDED)
    with pytest.raises(ConfigError, match=r"too little memory is left for a KV cache") as caught:
        size(memory)
    free, needed = (f"{number / 2**30:.1f} GiB" for number in (num_bytes, NEEDED))
    assert f"{free} of this engine's share of the GPU are free" in caught.value.message
    assert f"forwards need {needed}" in caught.value.message
    assert "kv_cache_tokens" not in caught.value.message


def test_a_size_that_leaves_forwards_no_room_is_refused() -> None:
    """Though it would be there: memory would run out while requests are answered."""
    assert size(on_gpu(1000), kv_cache_tokens=1000) == 1000
    with pytest.raises(ConfigError, match=r"of 1001 tokens does not fit: .*forwards need"):
        size(on_gpu(1000), kv_cache_tokens=1001)


def test_a_size_without_room_for_a_tree_is_refused() -> None:
    with pytest.raises(ConfigError, match="32 tokens has no room for one draft tree of 31; raise"):
        size(on_gpu(1000), kv_cache_tokens=32)
