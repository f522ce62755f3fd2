"""Building what ``hdserve bench engine`` needs: statistics, contenders and tasks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hdserve.arguments import naming
from hdserve.bench.contenders import Contender, EngineContender, GenerateContender, State
from hdserve.bench.engine import BASELINE
from hdserve.bench.prompts import EncodedPrompt, encode_prompts, longest_prompt
from hdserve.bench.replay_files import read_replay
from hdserve.bench.replay_setup import open_statistics
from hdserve.bench.task import Task
from hdserve.bench.task_names import name_among
from hdserve.engine.host import ModelHost
from hdserve.engine.request_check import check_token_ids
from hdserve.errors import ConfigError
from hdserve.prompts import PromptRow

MAX_STATISTICS_BYTES = 2 << 30
"""The largest table of statistics that are counted from recorded requests."""


def use_statistics(host: ModelHost, paths: Sequence[Path], *, is_replay: bool) -> None:
    """Make engines that are built from now on draft from ``paths`` and no other statistics.

    Args:
        is_replay: whether choices are recorded, so that ids belong to no tokenizer of ours.

    Raises:
        ConfigError: the statistics are of another tokenizer than the prompts will be.
        DatabaseError: see :func:`open_statistics`.
    """
    corpus = open_statistics(paths, MAX_STATISTICS_BYTES)
    assert corpus is not None, "there are paths"
    if not is_replay and corpus.info.tokenizer != host.tokenizer.fingerprint:
        raise ConfigError("--statistics: these are of another tokenizer than the model's")
    host.statistics = corpus


def make_contenders(names: Sequence[str], host: ModelHost, state: State) -> list[Contender]:
    """Return the contenders of these names, in this order; a name that is no other way of decoding
    drafts as configured for ``host``.

    Their engines exist at the same time, so each leaves as much of a GPU's free memory to every
    later one as it may take.
    """
    made: list[Contender] = []
    num_left = sum(not _is_stock(name) for name in names)
    for name in names:
        if _is_stock(name):
            made.append(GenerateContender(name, host, looks_up=name.endswith("lookup")))
            continue
        made.append(
            EngineContender(
                name,
                host,
                is_drafting=name != BASELINE,
                state=state,
                memory_share=1 / num_left,
            )
        )
        num_left -= 1
    return made


def _is_stock(name: str) -> bool:
    """Whether transformers alone decodes."""
    return name.startswith("transformers")


def prompt_tasks(rows: Iterable[PromptRow], host: ModelHost, max_tokens: int) -> list[Task]:
    """Return prompts by task, each cut as by :func:`encoded_prompts`."""
    prompts: dict[str, list[EncodedPrompt]] = defaultdict(list)
    for prompt in encoded_prompts(rows, host, max_tokens):
        prompts[prompt.row.task].append(prompt)
    return _apart([Task(name, found) for name, found in prompts.items()])


def replay_tasks(
    path: Path, limit: int | None, host: ModelHost, max_tokens: int
) -> tuple[list[Task], int]:
    """Return recorded requests by task, and how many were left out: those that leave no room for
    ``max_tokens`` in the model or an engine that there is, and those that are empty.

    Raises:
        ConfigError: nothing is left.
        InvalidRequest: a token id is not in the vocabulary; names its request, from 1 on.
    """
    vocab_size, longest = host.model.vocab_size, host.max_total_tokens
    prompts: dict[str, list[EncodedPrompt]] = defaultdict(list)
    recorded: dict[str, list[Sequence[int]]] = defaultdict(list)
    num_left_out = 0
    for number, request in enumerate(read_replay(path, limit), 1):
        with naming(f"{path}, request {number}"):
            check_token_ids("prompt", request.prompt, vocab_size)
            check_token_ids("response", request.response, vocab_size)
        fits = len(request.prompt) + max_tokens <= longest
        if not (fits and request.prompt and request.response):
            num_left_out += 1
            continue
        row = PromptRow(request.name, request.task, "")
        prompts[request.task].append(EncodedPrompt(row, request.prompt, is_cut=False))
        recorded[request.task].append(request.response)
    if not prompts:
        raise ConfigError(
            f"{path}: none of its {num_left_out} requests can be decoded; prompt and --max-tokens "
            f"{max_tokens} together may have at most {longest} tokens, and "
            "neither prompt nor response may be empty"
        )
    tasks = [Task(name, found, recorded[name]) for name, found in prompts.items()]
    return _apart(tasks), num_left_out


def _apart(tasks: Sequence[Task]) -> list[Task]:
    """Keep rows that name no task separate from all tasks together, if others name one."""
    names = {task.name for task in tasks}
    return [replace(task, name=name_among(task.name, names)) for task in tasks]


def encoded_prompts(
    rows: Iterable[PromptRow], host: ModelHost, max_tokens: int
) -> Iterator[EncodedPrompt]:
    """Return prompts, each cut to leave room for ``max_tokens`` in the model and in all its engines
    so far.

    Raises:
        ConfigError: that leaves none.
    """
    longest = longest_prompt(host.max_total_tokens, max_tokens)
    return encode_prompts(rows, host.tokenizer, longest)
