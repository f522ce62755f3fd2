"""An engine is made whole: nothing of it comes to be while requests wait."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import gc
import json

from numba.core.dispatcher import Dispatcher

from hdserve import LLM, SamplingParams


def compiled():
    found = [item for item in gc.get_objects() if isinstance(item, Dispatcher)]
    return sorted(
        f"{item.py_func.__module__}.{item.py_func.__name__}{signature}"
        for item in found
        if item.py_func.__module__.startswith("hdserve.")
        for signature in item.signatures
    )


llm = LLM("hdserve-mini", engine={"kv_cache_tokens": 8192})
before = compiled()
prompts = ["Count from one to ten, then again.", "Tell me of a king.", "a b c d e f g " * 40]
for temperature in (0.0, 1.0):
    params = SamplingParams(
        temperature=temperature, top_p=0.9, max_tokens=200, ignore_eos=True, seed=1
    )
    answers = llm.generate(prompts, params)
assert sum(answer.counts.num_accepted_tokens for answer in answers)
print(json.dumps({"before": before, "after": compiled()}))
"""


def test_requests_wait_for_no_compiler() -> None:
    """In a process of its own: in this one other tests have compiled what they call."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["before"]
    assert set(found["after"]) - set(found["before"]) == set()
