"""``hdserve check-lossless``: drafted output against plain output, token for token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hdserve import core
from hdserve.bench.prompts import EncodedPrompt
from hdserve.core import SpeculationParams
from hdserve.engine.engine import Engine
from hdserve.engine.host import ModelHost

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
}
_MAX_SHOWN_DIFFERENCES = 10


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a drafted output first left the plain one.

    Attributes:
        position: index in the output.
        gap: how far apart the two tokens are in log probability at that place, given the same
            tokens before; a gap near 0 is a tie that rounding decided.
    """

    prompt: str
    databases: str
    position: int
    plain_token: int | None
    drafted_token: int | None
    gap: float | None


@dataclass(slots=True)
class SettingResult:
    """One line of the report.

    Attributes:
        identical: prompts whose drafted token lists, cold and filled, equal the plain one.
    """

    setting: str
    dtype: str
    is_exact: bool
    identical: int = 0
    total: int = 0
    num_cut_prompts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    first_differences: list[Difference] = field(default_factory=list)

    @property
    def is_lossless(self) -> bool:
        """All equal, and something was really drafted and accepted."""
        return self.identical == self.total and self.accepted_tokens > 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check_lossless(
    host: ModelHost,
    prompts: Sequence[EncodedPrompt],
    max_tokens: int,
    *,
    batch_size: int = 1,
    progress: Callable[[int], None] = lambda _: None,
) -> list[SettingResult]:
    """Decode every prompt plainly, drafted with cold databases, and drafted again with the
    databases that pass filled; greedy and sampled.

    Args:
        progress: told how many sequences have ended.
    """
    results = []
    for setting, sampling in SETTINGS.items():
        engine = host.make_engine()
        host.own_database.clear()
        result = SettingResult(
            setting, str(host.model.dtype).removeprefix("torch."), engine.is_exact
        )
        result.num_cut_prompts = sum(prompt.is_cut for prompt in prompts)
        plain = _decode(
            engine, prompts, sampling, max_tokens, batch_size, progress, is_drafted=False
        )
        different = set()
        for databases in ("cold", "filled"):
            drafted = _decode(
                engine, prompts, sampling, max_tokens, batch_size, progress, is_drafted=True
            )
            _count(result, drafted)
            for index, (one, other) in enumerate(zip(plain, drafted, strict=True)):
                if one.token_ids != other.token_ids:
                    different.add(index)
                    result.first_differences.append(
                        _difference(engine, prompts[index], databases, one, other)
                    )
        result.total = len(prompts)
        result.identical = len(prompts) - len(different)
        del result.first_differences[_MAX_SHOWN_DIFFERENCES:]
        results.append(result)
    return results


def _decode(
    engine: Engine,
    prompts: Iterable[EncodedPrompt],
    sampling: dict[str, Any],
    max_tokens: int,
    batch_size: int,
    progress: Callable[[int], None],
    *,
    is_drafted: bool,
) -> list[core.Sequence]:
    """The sequences in the order of ``prompts``; plain output does not enter the databases."""
    speculation = SpeculationParams(is_enabled=is_drafted, is_output_shared=is_drafted)
    sequences = [
        core.Sequence(
            f"{index}",
            list(prompt.token_ids),
            core.SamplingParams(max_tokens=max_tokens, seed=index, **sampling),
            speculation,
        )
        for index, prompt in enumerate(prompts)
    ]
    waiting = sequences[::-1]
    num_open = 0
    while waiting or num_open:
        while waiting and num_open < batch_size:
            engine.add(waiting.pop())
            num_open += 1
        num_ended = sum(output.finish_reason is not None for output in engine.step())
        num_open -= num_ended
        progress(num_ended)
    return sequences


def _count(result: SettingResult, sequences: Iterable[core.Sequence]) -> None:
    for seq in sequences:
        result.draft_tokens += seq.counts.num_draft_tokens
        result.accepted_tokens += seq.counts.num_accepted_tokens
        for source, count in seq.counts.accepted_by_source.items():
            label = source.label
            result.accepted_by_source[label] = result.accepted_by_source.get(label, 0) + count


def _difference(
    engine: Engine,
    prompt: EncodedPrompt,
    databases: str,
    plain: core.Sequence,
    drafted: core.Sequence,
) -> Difference:
    one, other = plain.output_token_ids, drafted.output_token_ids
    position = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    tokens = [ids[position] if position < len(ids) else None for ids in (one, other)]
    gap = None
    if None not in tokens:
        common = plain.token_ids[: plain.num_prompt_tokens + position]
        gap = _gap(engine, common, tokens)
    return Difference(prompt.row.name, databases, position, tokens[0], tokens[1], gap)


def _gap(engine: Engine, token_ids: list[int], choices: Sequence[int | None]) -> float | None:
    """Difference in log probability of two tokens after ``token_ids``."""
    seq = core.Sequence(
        "gap",
        list(token_ids),
        core.SamplingParams(max_tokens=1, temperature=0.0, logprobs=core.MAX_TOP_LOGPROBS),
        SpeculationParams(is_enabled=False, is_output_shared=False),
    )
    engine.add(seq)
    while True:
        for output in engine.step():
            if output.logprobs:
                found = dict(output.logprobs[0].top)
                values = [found.get(choice) for choice in choices if choice is not None]
                if len(values) == 2 and values[0] is not None and values[1] is not None:
                    return abs(values[0] - values[1])
                return None
