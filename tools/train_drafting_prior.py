"""Make the calibration prior that ships: ``hdserve/drafting/prior.msgpack``.

Recorded requests are replayed with and without the model and statistics databases, cold and
online, so that every kind of evidence is seen.  The statistics come from most of the corpus; the
rest of its conversations is replayed as well, so that text like the corpus and text unlike it are
both learned from.  What the model itself thought likely is in no recording, so bundled models
answer prompts as well.  Models as small as these say less that is found again than others do, so
the recordings are replayed once more after them.  Only permissively licensed text may be given:
share-alike sources of the corpus and the output of commercial models are left out by name.

Token ids mean something to their tokenizer alone.  So each recording is given with the tokenizer
it was made with, is drafted for from statistics only where these have the same, and what is learned
of tokens is handed on only between requests of one tokenizer; cells and weights go through all.

The models are asked ``NUM_PROMPTS`` rows of ``--prompts``, evenly spaced over those that
``--except`` does not have (by ``question_id``): what is measured with a model is not trained on.

    python -m tools.train_drafting_prior --tokenizer llama2 --corpus corpus.jsonl.gz \\
        --replay llama2 specbench-vicuna-7b.fill.jsonl.gz \\
        --replay mistral-v3 tools-tau2-gpt-4.1.fill.jsonl.gz \\
        --model hdserve-tiny --model hdserve-mini --prompts question.jsonl --except prompts60.jsonl
"""

from __future__ import annotations

import argparse
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hdserve.bench.prompt_sharing import PromptSharingDatabase
from hdserve.bench.prompts import encode_prompt
from hdserve.bench.replay import Replay, ReplayMode
from hdserve.bench.replay_files import ReplayRow, read_replay
from hdserve.bench.replay_setup import ending_token_ids, largest_id
from hdserve.config import ModelConfig
from hdserve.core import DEFAULT_NAMESPACE, SamplingParams, Sequence
from hdserve.databases.model import ModelDatabase
from hdserve.databases.statistics import StatisticsDatabase
from hdserve.databases.statistics_builder import StatisticsBuilder
from hdserve.drafting.base import DraftResources
from hdserve.drafting.calibration import PRIOR_NAME, Calibration
from hdserve.drafting.hierarchy import Hierarchy
from hdserve.drafting.states import pack_states, unpack_states
from hdserve.engine.host import ModelHost
from hdserve.engine.tokenization.tokenizer import Tokenizer, load_tokenizer
from hdserve.prompts import PromptRow, read_prompts

EXCLUDED = ("SGD", "GPTeacher")
REPLAYED_PART = 40
"""One of so many conversations is replayed instead of counted."""

OF_ALL = ("cells", "weights")
"""Arrays of a calibration that know no token."""

OF_TOKENS = ("token_weights", "token_bias", "pair_bias")

BUDGET, MAX_DEPTH = 16, 24
MAX_REQUESTS = 150
MAX_ANSWER_TOKENS = 96
NUM_PROMPTS = 120
TEMPERATURES = (0.5, 1.0)
"""Greedy answers of small models repeat themselves more than text does."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument(
        "--replay", nargs=2, action="append", required=True, metavar=("TOKENIZER", "FILE")
    )
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--except", type=Path, dest="measured")
    parser.add_argument("--output", type=Path, default=Path("hdserve/drafting") / PRIOR_NAME)
    args = parser.parse_args()
    if args.model and args.prompts is None:
        parser.error("--model needs --prompts")

    tokenizer = load_tokenizer(args.tokenizer)
    statistics, conversations = read_corpus(args.corpus, tokenizer)
    sets = [(tokenizer.fingerprint, conversations[:MAX_REQUESTS])]
    for name, path in args.replay:
        sets.append((load_tokenizer(name).fingerprint, list(read_replay(path, MAX_REQUESTS))))
    learned = learn_from_sets(sets, tokenizer.fingerprint, statistics)
    prompts = [] if args.prompts is None else choose_prompts(args.prompts, args.measured)
    for model in args.model:
        for temperature in TEMPERATURES:
            learned = learn_from_model(learned, model, prompts, temperature)
    if args.model:
        learned = learn_from_sets(sets, tokenizer.fingerprint, statistics, learned)
    args.output.write_bytes(learned.for_vocabulary(0).to_bytes())
    print(f"{args.output}: {args.output.stat().st_size} bytes")


def read_corpus(path: Path, tokenizer: Tokenizer) -> tuple[StatisticsDatabase, list[ReplayRow]]:
    """Return statistics of most of the corpus, and the other conversations as requests."""
    builder = StatisticsBuilder(tokenizer.fingerprint, tokenizer.vocab_size, max_bytes=2 << 30)
    conversations: list[ReplayRow] = []
    for row in _rows(path):
        if row["source"].startswith(EXCLUDED):
            continue
        if "messages" not in row:
            builder.add("corpus", tokenizer.encode(row["text"], adds_special_tokens=False))
            continue
        turns = [(m["role"], m["content"]) for m in row["messages"] if m["content"]]
        encoded = [tokenizer.encode(text, adds_special_tokens=False) for _, text in turns]
        end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        if zlib.crc32(row["id"].encode()) % REPLAYED_PART:
            for (role, _), ids in zip(turns, encoded, strict=True):
                builder.add("corpus", ids + end * (role == "assistant"))
            continue
        prompt: list[int] = []
        for (role, _), ids in zip(turns, encoded, strict=True):
            if role == "assistant" and prompt:
                conversations.append(
                    ReplayRow(row["id"], row["source"], tuple(prompt), tuple(ids + end))
                )
            prompt = prompt + ids
    return builder.finish(), conversations


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def learn_from_sets(
    sets: list[tuple[str, list[ReplayRow]]],
    statistics_tokenizer: str,
    statistics: StatisticsDatabase,
    prior: Calibration | None = None,
) -> Calibration:
    """Replay sets of requests, each with the fingerprint of its tokenizer; return what was learned
    at last.

    Args:
        prior: the cells and weights to begin with; ``None`` knows nothing.
    """
    largest = max(largest_id(rows) for _, rows in sets)
    learned = Calibration(largest + 1)
    if prior is not None:
        hand_on(prior, learned, OF_ALL)
    by_tokenizer: dict[str, Calibration] = {}
    for corpus in (None, statistics):
        for mode in (ReplayMode.COLD, ReplayMode.ONLINE):
            for share_prompts in (False, True):
                for tokenizer, rows in sets:
                    if corpus is not None and tokenizer != statistics_tokenizer:
                        continue
                    before = by_tokenizer.get(tokenizer, Calibration(learned.vocab_size))
                    hand_on(learned, before, OF_ALL)
                    learned = learn(before, rows, corpus, mode, share_prompts)
                    by_tokenizer[tokenizer] = learned
    return learned


def hand_on(source: Calibration, target: Calibration, names: tuple[str, ...]) -> None:
    """Copy arrays of one calibration to another."""
    for name in names:
        getattr(target, name)[:] = getattr(source, name)


def learn(
    before: Calibration,
    rows: list[ReplayRow],
    statistics: StatisticsDatabase | None,
    mode: ReplayMode,
    share_prompts: bool,
) -> Calibration:
    """Return what is learned by replaying ``rows``, beginning with ``before``."""
    database = PromptSharingDatabase() if share_prompts else ModelDatabase()
    resources = DraftResources(
        before.vocab_size, database, statistics, ending_token_ids=ending_token_ids(rows)
    )
    drafter = Hierarchy(resources)
    learned = drafter.calibration(DEFAULT_NAMESPACE)
    hand_on(before, learned, OF_ALL + OF_TOKENS)
    run = Replay([drafter], database, mode, BUDGET, MAX_DEPTH)
    run.run(rows)
    length = run.result.mean_acceptance_length
    print(f"{len(rows)} requests, {mode}, statistics {statistics is not None}: {length:.3f}")
    return learned


def choose_prompts(path: Path, measured: Path | None) -> list[PromptRow]:
    """Return ``NUM_PROMPTS`` rows of a file, or all it has, evenly spaced over those whose
    ``question_id`` no row of ``measured`` has."""
    names = set() if measured is None else {row.name for row in read_prompts(measured)}
    rows = [row for row in read_prompts(path) if row.name not in names]
    num = min(NUM_PROMPTS, len(rows))
    return [rows[index * len(rows) // num] for index in range(num)]


def learn_from_model(
    prior: Calibration, model: str, prompts: list[PromptRow], temperature: float
) -> Calibration:
    """Let a model answer ``prompts`` one by one; return the state after it."""
    options = {"max_draft_tokens": BUDGET, "max_depth": MAX_DEPTH, "adapts_budget": False}
    host = ModelHost(
        ModelConfig.model_validate(
            {
                "name": model,
                "model": model,
                "engine": {"dtype": "float32", "exact": True, "compile": False},
                "drafting": options,
            }
        )
    )
    engine = host.make_engine()
    begun = prior.for_vocabulary(host.model.vocab_size)
    begun.num_tokens = 1  # what has learned from nothing is not adopted
    engine.drafters.adopt(DEFAULT_NAMESPACE, pack_states({Hierarchy.name: begun.to_bytes()}))
    num_tokens = num_steps = 0
    for index, row in enumerate(prompts):
        prompt = encode_prompt(row, host.tokenizer, host.model.max_model_len - MAX_ANSWER_TOKENS)
        params = SamplingParams(max_tokens=MAX_ANSWER_TOKENS, temperature=temperature, seed=index)
        seq = Sequence(row.name, list(prompt.token_ids), params)
        engine.add(seq)
        while engine.has_work:
            engine.step()
        num_tokens += seq.num_output_tokens
        num_steps += seq.counts.num_steps
    print(f"{model}, temperature {temperature}: {num_tokens / num_steps:.3f}")
    states = engine.drafters.states(DEFAULT_NAMESPACE)
    assert states is not None, "too few prompts"
    return Calibration.from_bytes(unpack_states(states)[Hierarchy.name])


if __name__ == "__main__":
    main()
