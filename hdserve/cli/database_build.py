"""``hdserve database build``: what a model answers to a file of prompts, before anybody asks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from hdserve.cli.interruption import interruptible
from hdserve.cli.json_option import Json, JsonOutput
from hdserve.cli.progress import progress
from hdserve.cli.prompts_option import Prompts
from hdserve.core import DEFAULT_NAMESPACE
from hdserve.databases.output_files import database_directory
from hdserve.databases.output_log import OutputLog
from hdserve.databases.output_store import OutputStore
from hdserve.databases.segment import MAX_OUTPUT_TOKENS, Segment, concatenate
from hdserve.databases.snapshot import DatabaseKey
from hdserve.errors import DatabaseError
from hdserve.prompts import read_prompts

_UNBOUNDED = 2**62


@interruptible()
def build(
    root: Annotated[Path, typer.Argument(help="The `snapshot_dir` of the configuration.")],
    prompts: Prompts,
    model: Annotated[
        str, typer.Option(help="A bundled model, a directory or a Hugging Face id.")
    ] = "hdserve-tiny",
    name: Annotated[
        str | None, typer.Option(help="The `name` it is served under; default: --model.")
    ] = None,
    namespace: Annotated[str, typer.Option(help="Whose requests draft from it.")] = (
        DEFAULT_NAMESPACE
    ),
    max_tokens: Annotated[
        int, typer.Option(help="Tokens per answer.", min=1, max=MAX_OUTPUT_TOKENS)
    ] = 256,
    batch_size: Annotated[int, typer.Option(help="Prompts answered together.", min=1)] = 8,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    limit: Annotated[int | None, typer.Option(help="Only the first N prompts.", min=1)] = None,
    json_path: Json = None,
) -> None:
    """Answer prompts and keep the answers in a model database that is not in use.

    A new model then drafts from its first request on as one that has served such requests does.
    An interrupted build goes on where it was when the same command is run again.
    """
    from hdserve.engine.tokenizer import load_tokenizer
    from hdserve.llm import LLM

    output = JsonOutput(json_path)
    rows = read_prompts(prompts, limit)
    origin = _origin(model, prompts, max_tokens, temperature)
    key = DatabaseKey(name or model, load_tokenizer(model).fingerprint)
    store = OutputStore(database_directory(root, key), key, lock_timeout_s=1.0)
    if not store.is_writable:
        raise DatabaseError(f"{store.directory} is in use; end the application that serves it")
    log = OutputLog(_UNBOUNDED, _UNBOUNDED, first_version=store.first_version)
    try:
        store.restore(log)
        missing = _missing(log, namespace, origin, len(rows))
        llm = LLM(model) if missing else None
        with progress("answering", len(rows), len(rows) - len(missing)) as bar:
            for begin in range(0, len(missing), batch_size):
                assert llm is not None
                batch = missing[begin : begin + batch_size]
                params = llm.sampling(max_tokens=max_tokens, temperature=temperature)
                answers = llm.generate([rows[index].messages for index in batch], params)
                found = zip(batch, (answer.token_ids for answer in answers), strict=True)
                for appended in log.append(namespace, _segment(origin, found)):
                    store.append(namespace, appended)
                bar.advance(len(batch))
        if not store.sync(log) or store.num_failures:
            raise DatabaseError(f"{store.directory} cannot be written; the log says why")
    finally:
        store.close()
    if output.has_text:
        told = f"{len(rows):,} prompts, {len(missing):,} of them answered now"
        typer.echo(f"{key.model}: {told}")
    facts = {"model": key.model, "num_prompts": len(rows), "num_answered_now": len(missing)}
    output.write(facts)


def _origin(model: str, prompts: Path, max_tokens: int, temperature: float) -> str:
    """Names a build, so that the same one counts each of its answers once."""
    settings = json.dumps([model, max_tokens, temperature]).encode()
    return f"build-{hashlib.sha256(settings + prompts.read_bytes()).hexdigest()[:16]}"


def _missing(log: OutputLog, namespace: str, origin: str, num_rows: int) -> list[int]:
    intervals = log.partition(namespace).seen().get(origin, [])
    done = {index for start, stop in intervals for index in range(start, stop)}
    return [index for index in range(num_rows) if index not in done]


def _segment(origin: str, outputs: Iterable[tuple[int, Sequence[int]]]) -> Segment:
    return concatenate(list(_segments(origin, outputs)))


def _segments(origin: str, outputs: Iterable[tuple[int, Sequence[int]]]) -> Iterator[Segment]:
    for index, token_ids in outputs:
        if token_ids:
            yield Segment.from_outputs(origin, index, [np.array(token_ids, np.uint32)])
