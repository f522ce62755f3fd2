"""What is fuzzed: each target reads bytes as somebody hostile or careless may have written them.

A target returns when the input was taken or was refused as it should be, with an error of
:mod:`hdserve.errors` and a message of bounded length.  Everything else is a finding.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from deployments.anthropic.protocol import MessagesBody
from deployments.openai.json_text import parse_json
from deployments.openai.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from deployments.openai.request_body import parse_body
from deployments.openai.responses_protocol import ResponsesBody
from deployments.parsers.tool_parsers import TOOL_PARSERS
from hdserve.access import Access, ApiKey, read_access
from hdserve.bench.replay_files import read_replay
from hdserve.config import AccessConfig, parse_config, read_config
from hdserve.core import SamplingParams, Source, SpeculationParams
from hdserve.databases import snapshot
from hdserve.databases.append_log import pack_record, read_records
from hdserve.databases.corpus import read_segments
from hdserve.databases.messages import Poll, Position, Publish, Reply
from hdserve.databases.output_log import Changes
from hdserve.databases.segment import Segment
from hdserve.databases.snapshot import DatabaseKey
from hdserve.drafting.calibration import Calibration
from hdserve.drafting.states import pack_states, unpack_states
from hdserve.engine.sampling.verifier import verify
from hdserve.errors import HdserveError, Unauthorized
from hdserve.prompts import read_prompts
from hdserve.tree import DraftTree
from tests.deployments.parsers.calls import joined

MAX_MESSAGE_CHARACTERS = 20_000
"""Of what a user is told; requests have a far tighter bound of their own."""

MAX_REQUEST_MESSAGE_CHARACTERS = 1000

KEY = DatabaseKey("model", "f" * 64)

Target = Callable[[bytes], None]

_DIRECTORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())


@contextmanager
def refused(max_characters: int = MAX_MESSAGE_CHARACTERS) -> Iterator[None]:
    """An error for the user is an answer; a message without end is not."""
    message = ""
    try:
        yield
    except HdserveError as error:
        message = error.message
    assert len(message) <= max_characters, len(message)
    message.encode()  # it can be sent


class Pieces:
    """Numbers out of the fuzzer's bytes; zeros when they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_used_up(self) -> bool:
        return self._at >= len(self._data)

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def rest(self) -> bytes:
        found, self._at = self._data[self._at :], len(self._data)
        return found


def protocol(data: bytes) -> None:
    """Bodies of requests, up to what the model server makes of them."""
    pieces = Pieces(data)
    which = pieces.byte()
    with refused(MAX_REQUEST_MESSAGE_CHARACTERS):
        body: Any = parse_json(pieces.rest())
        if which % 8 == 0:
            parse_body(TokenizeBody, body)
        elif which % 8 == 1:
            parse_body(DetokenizeBody, body)
        elif which % 2:
            read_generation(CompletionBody.parse(body).to_generation("r"))
        else:
            kinds: dict[int, Any] = {4: MessagesBody, 6: ResponsesBody}
            kind = kinds.get(which % 8)
            chat = ChatBody.parse(body) if kind is None else kind.parse(body).to_chat()
            parser = [*TOOL_PARSERS.values(), None][which // 8 % (len(TOOL_PARSERS) + 1)]
            read_generation(chat.to_generation("r", parser))


def read_generation(generation: Any) -> None:
    SamplingParams(**generation.sampling)
    SpeculationParams(**generation.speculation)


def tool_calls(data: bytes) -> None:
    """What a model writes: the same calls however the text is cut."""
    pieces = Pieces(data)
    parser = [*TOOL_PARSERS.values()][pieces.byte() % len(TOOL_PARSERS)]
    size = 1 + pieces.byte() % 16
    text = pieces.rest().decode(errors="replace")
    whole, cut = parser(), parser()
    expected = joined([*whole.push(text), *whole.finish()])
    parts = [part for at in range(0, len(text), size) for part in cut.push(text[at : at + size])]
    assert joined([*parts, *cut.finish()]) == expected


def snapshots(data: bytes) -> None:
    """Messages and files of the model database: as they are, and with a checksum that is right."""
    pieces = Pieces(data)
    which, rest = pieces.byte(), pieces.rest()
    if which % 8 == 0:
        message = rest
    else:
        fields = {
            "magic": snapshot.MAGIC,
            "version": snapshot.FORMAT_VERSION,
            "kind": ("publish", "poll", "reply")[which % 3],
            "model": KEY.model,
            "fingerprint": KEY.fingerprint,
            "payload": rest,
        }
        message = snapshot.pack({**fields, "checksum": snapshot._checksum(fields)})
    with refused():
        if which % 3 == 0:
            Publish.decode(message, KEY.fingerprint, KEY.model)
        elif which % 3 == 1:
            Poll.decode(message, KEY)
        else:
            Reply.decode(message, KEY)


def states(data: bytes) -> None:
    """What drafters have learned, as other replicas send it."""
    with refused():
        for state in unpack_states(data).values():
            Calibration.from_bytes(state)
    with refused():
        Calibration.from_bytes(data)


def append_logs(data: bytes) -> None:
    """Files of the model database on a disk that failed."""
    with _file(".log", data) as path, refused():
        records = read_records(path, 2**20)
        assert sum(map(len, records.bodies)) <= len(data)


def corpora(data: bytes) -> None:
    """Texts, rows, recorded requests and prompts."""
    pieces = Pieces(data)
    which, rest = pieces.byte(), pieces.rest()
    if which % 16 == 0:
        rest = gzip.compress(rest, 1)[: len(rest) + 1]
    suffix = (".jsonl", ".txt")[which // 64 % 2] + (".gz" if which % 16 == 0 else "")
    with _file(suffix, rest) as path:
        with refused():
            for segment in read_segments(path):
                assert isinstance(segment.content, (str, list))
        with refused():
            for row in read_replay(path):
                assert all(token >= 0 for token in (*row.prompt, *row.response))
        with refused():
            read_prompts(path)


def configurations(data: bytes) -> None:
    """YAML files of configuration, and files of API keys."""
    pieces = Pieces(data)
    which, rest = pieces.byte(), pieces.rest()
    if which % 8 == 0:
        with _file(".keys", rest) as path, refused():
            access = read_access(AccessConfig(api_keys_file=path))
            assert all(isinstance(key, ApiKey) for key in access.keys)
            _sign_in(access, rest)
        return
    if which % 8 == 1:
        with _file(".yaml", rest) as path, refused():
            read_config(path)
        return
    with refused():
        try:
            found = yaml.safe_load(rest.decode(errors="replace"))
        except (yaml.YAMLError, ValueError, RecursionError):
            return
        parse_config({"models": [found]} if isinstance(found, dict) and which % 2 else found)


def _sign_in(access: Access, data: bytes) -> None:
    try:
        access.identify(f"Bearer {data.decode('latin-1')}")
    except Unauthorized:
        return


def trees(data: bytes) -> None:
    """Any order of calls gives a valid tree, and a walk that ends."""
    pieces = Pieces(data)
    capacity, max_depth = pieces.byte() % 65, pieces.byte() % 33
    tree = DraftTree(pieces.byte() % 8, capacity, max_depth)
    sources = list(Source)
    while not pieces.is_used_up:
        call, source = pieces.byte() % 3, sources[pieces.byte() % len(sources)]
        token_ids = [pieces.byte() % 8 for _ in range(pieces.byte() % 12)]
        if call == 0:
            parent = pieces.byte() % (len(tree) + 1)
            try:
                tree.add_node(parent, pieces.byte() % 8, source)
            except IndexError:
                assert parent >= len(tree)
        elif call == 1:
            tree.add_path(token_ids, source)
        else:
            tree.truncate(pieces.byte() % 70)
    check_tree(tree, capacity, max_depth)
    acceptance = verify(tree, lambda node: tree.token_ids[-1 - node % len(tree)] % 8)
    assert acceptance.token_ids[:-1] == [tree.token_ids[node] for node in acceptance.path[1:]]


def check_tree(tree: DraftTree, capacity: int, max_depth: int) -> None:
    columns = (tree.token_ids, tree.parents, tree.depths, tree.sources, tree.scores)
    assert {len(column) for column in columns} == {len(tree)}
    assert tree.num_draft_tokens <= capacity
    siblings = set()
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        assert 0 <= parent < node
        assert tree.depths[node] == tree.depths[parent] + 1 <= max_depth
        assert (parent, tree.token_ids[node]) not in siblings
        siblings.add((parent, tree.token_ids[node]))


@contextmanager
def _file(suffix: str, data: bytes) -> Iterator[Path]:
    with tempfile.NamedTemporaryFile(suffix=suffix, dir=_DIRECTORY) as file:
        file.write(data)
        file.flush()
        yield Path(file.name)


TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        protocol,
        tool_calls,
        snapshots,
        states,
        append_logs,
        corpora,
        configurations,
        trees,
    )
}


def seeds(name: str) -> list[bytes]:
    """Inputs that are right, to begin with."""
    return _SEEDS[name]


_CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": None}],
    "temperature": 0.5,
    "top_p": 1,
    "logit_bias": {"5": 1.5},
    "stop": ["a"],
    "n": 2,
    "seed": 7,
    "logprobs": True,
    "top_logprobs": 3,
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "prediction": {"type": "content", "content": [{"type": "text", "text": "a"}]},
    "speculation": {"enabled": True, "databases": ["context"], "max_draft_tokens": 3},
}
_COMPLETION = {
    "model": "m",
    "prompt": [[1, 2], [3]],
    "max_tokens": 5,
    "logprobs": 1,
    "echo": True,
}
_FORMS = [
    {"guided_json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    {"guided_regex": "[a-z]+"},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}},
]
_RESPONSE = {
    "model": "m",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "b"},
    ],
    "instructions": "a",
    "max_output_tokens": 5,
    "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}},
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "tool_choice": "auto",
    "store": False,
    "metadata": {"a": "b"},
}
_CONFIG = {
    "models": [
        {
            "name": "a",
            "model": "hdserve-tiny",
            "engine": {"dtype": "bfloat16", "exact": "auto", "max_num_sequences": 4},
            "drafting": {"drafters": [{"name": "hierarchy", "options": {"min_score": 0.1}}]},
        },
        {"name": "b", "model": "hdserve-tiny", "draft_from": ["a"]},
    ],
    "gateway": {"num_replicas": 2, "max_body_bytes": 4096},
    "telemetry": {"endpoint": "http://a:4318/v1/traces", "sample_ratio": 0.5},
}


_MESSAGES = {
    "model": "m",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "a"}],
    "messages": [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "b"}]},
    ],
    "stop_sequences": ["a"],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "disabled"},
    "output_config": {"format": {"type": "json_schema", "schema": {}}},
}
_REQUESTS: list[tuple[int, Any]] = [
    (0, {"model": "m", "prompt": "a", "return_token_strs": True}),
    (0, {"model": "m", "messages": [{"role": "user", "content": "a"}]}),
    (1, {"model": "m", "tokens": [1, 2]}),
    (2, _CHAT),
    *((3, {**_COMPLETION, **form}) for form in _FORMS),
    (4, _MESSAGES),
    (6, _RESPONSE),
]
"""Bodies, and the first byte with which :func:`protocol` reads them."""

_SEGMENTS = (
    b'{"text": "a b", "source": "s", "licence": "MIT"}\n'
    b'{"messages": [{"role": "assistant", "content": "hi"}]}\n'
    b'{"prompt": [1, 2], "response": [3]}\n'
)
_REPLAY = b"".join(
    b'{"id": "%d", "task": "chat", "prompt": [1, 2], "response": [3]}\n' % number
    for number in range(3)
)
_PROMPTS = (
    b'{"prompt": "a b", "question_id": 7, "task": "chat"}\n'
    b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    b'{"turns": ["a", "b"], "category": "chat"}\n'
)


def _wire() -> list[bytes]:
    """A message of each kind: its payload, and as it is."""
    outputs = [np.array([1, 2, 3], np.uint32), np.array([4], np.uint32)]
    segment = Segment.from_outputs("replica", 3, outputs)
    messages = {
        (b"\3", b"\0"): Publish("replica", {"a": segment}, {"a": b"state"}, ("a",)),
        (b"\4", b"\x10"): Poll("replica", "e", {"a": Position(7, 1, 2)}, {"b": 3}, {"a": (3, 5)}),
        (b"\5", b"\x08"): Reply(
            "e", 0.5, changes={"a": Changes(segment, 9, True)}, refill={"a": {"replica": [[3, 5]]}}
        ),
    }
    found = []
    for (of_payload, of_message), message in messages.items():
        data = message.encode(KEY)
        found += [of_payload + snapshot._open_envelope(data)["payload"], of_message + data]
    return found


_SEEDS: dict[str, list[bytes]] = {
    "protocol": [bytes([first]) + json.dumps(body).encode() for first, body in _REQUESTS],
    "tool_calls": [
        first + body
        for first in (b"\0\3", b"\1\3")
        for body in (
            b'a<tool_call>{"name": "f", "arguments": {"a": [1, "</tool_call>"]}}</tool_call>b',
            b'{"name": "f", "parameters": {"a": "}"}}; {"name": "g", "parameters": {}}',
        )
    ],
    "snapshots": _wire(),
    "states": [Calibration(8).to_bytes(), pack_states({"hierarchy": Calibration(8).to_bytes()})],
    "append_logs": [pack_record(b"a") + pack_record(b"bc")],
    "corpora": [
        b"\x41a b\nc\n",
        *(first + rows for first in (b"\1", b"\x10") for rows in (_SEGMENTS, _REPLAY, _PROMPTS)),
    ],
    "configurations": [
        b"\0a-key-of-16-bytes-or-more tenant\n# comment\n",
        b"\1" + yaml.safe_dump(_CONFIG).encode(),
        b"\2" + yaml.safe_dump(_CONFIG).encode(),
        b"\3" + yaml.safe_dump(_CONFIG["models"][0]).encode(),  # type: ignore[index]
    ],
    "trees": [bytes(range(64))],
}
