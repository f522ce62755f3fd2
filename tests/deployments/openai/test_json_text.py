"""What a body has is counted before it is read, beside the work of other threads."""

from __future__ import annotations

import json
import random
import threading
import time

import pytest

from deployments.openai import json_text
from deployments.openai.json_text import num_parts

TOKENS = ("a", "[", "{", ":", '"', "\\", '\\"[', "\n", "é")
MANY = b"[" + b"[]," * 101 + b",".join([b'"a"'] * 1_000_000) + b"]"


@pytest.mark.parametrize("piece_bytes", [1, 2, 7, 2**16])
def test_what_is_in_texts_does_not_count(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever one piece ends and the next begins."""
    monkeypatch.setattr(json_text, "_PIECE_BYTES", piece_bytes)
    for seed in range(20):
        chosen = random.Random(seed)
        texts = ["".join(chosen.choices(TOKENS, k=chosen.randrange(6))) for _ in range(150)]
        body = json.dumps([[text, {text: 1}] for text in texts], ensure_ascii=seed % 2 == 0)
        assert num_parts(body.encode()) == 1 + 3 * len(texts)


def longest_halt_s(body: bytes) -> tuple[float, float]:
    """How long a thread stood still at most while the parts were counted in another, and how long
    that took."""
    halts_s, is_over, is_ticking = [0.0], threading.Event(), threading.Event()

    def tick() -> None:
        while not is_over.is_set():
            start_s = time.perf_counter()
            time.sleep(0.0005)
            halts_s.append(time.perf_counter() - start_s)
            is_ticking.set()

    thread = threading.Thread(target=tick)
    thread.start()
    is_ticking.wait()
    start_s = time.perf_counter()
    num_parts(body)
    took_s = time.perf_counter() - start_s
    is_over.set()
    thread.join()
    return max(halts_s), took_s


def test_many_texts_hold_up_no_other_thread() -> None:
    """A busy machine is given five tries."""
    shares = []
    for _ in range(5):
        halt_s, took_s = longest_halt_s(MANY)
        shares.append(halt_s / took_s)
        if shares[-1] < 0.5:
            break
    assert min(shares) < 0.5
