"""Large answers hold up nobody while they are written."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from deployments.deadline import Deadline
from deployments.events import named_event
from deployments.http.json_answer import json_answer, json_pieces, long_event
from deployments.off_loop import MAX_INLINE_SIZE, OffLoop
from deployments.openai.long_list import LongList

TOKENS: Any = LongList(range(1000), lambda number: {"token": f"\u00e9{number}", "logprob": -0.5})
ANSWER = {
    "choices": [
        {"index": 0, "text": "a\n\u00e9", "token_ids": [*range(200)], "logprobs": None},
        {"index": 1, "logprobs": {"content": TOKENS, "empty": []}, "few": TOKENS[:3]},
    ],
    "usage": {},
    "nothing": [],
}


@pytest.mark.parametrize("size", [MAX_INLINE_SIZE, MAX_INLINE_SIZE + 1])
def test_answers_are_those_of_the_framework(size: int) -> None:
    """However they are written."""
    answer = asyncio.run(json_answer(OffLoop(), size, lambda: ANSWER, Deadline(), {"x-a": "b"}))
    expected = json.dumps(ANSWER, default=list, ensure_ascii=False, separators=(",", ":"))
    assert bytes(answer.body).decode() == expected
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-a"] == "b"


def test_no_piece_is_long() -> None:
    """The interpreter does nothing beside the encoder."""
    values = {"choices": [{"logprobs": {"content": TOKENS}}], "tokens": [*range(100_000)]}
    assert max(map(len, json_pieces(values))) < 3000


def test_large_answers_are_made_beside_others() -> None:
    """This one could not be made on the loop, which has to go on meanwhile."""
    has_gone_on = threading.Event()

    def make() -> Any:
        return {"has_gone_on": has_gone_on.wait(10)}

    async def test() -> bytes:
        asyncio.get_running_loop().call_later(0.01, has_gone_on.set)
        size = MAX_INLINE_SIZE + 1
        return bytes((await json_answer(OffLoop(), size, make, Deadline())).body)

    assert json.loads(asyncio.run(test())) == {"has_gone_on": True}


def test_events_with_long_lists_are_those_of_others() -> None:
    """In one line, of ASCII alone, as some clients take other characters for the ends of lines."""

    def event(logprobs: Any) -> dict[str, Any]:
        part = {"logprobs": logprobs, "text": "a\n\u2028"}
        return {"type": "a.b", "response": {"output": [{"content": [part]}]}}

    assert long_event(event(TOKENS)) == named_event(event(TOKENS[:]))
    assert long_event(event([])) == named_event(event([]))
    assert max(map(len, json_pieces(event(TOKENS)))) < 3000
