"""``hdserve check-lossless``: drafted output against plain output, token for token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import TypeAdapter

from hdserve import core
from hdserve.bench.checked_step import checked_step
from hdserve.bench.prompts import EncodedPrompt
from hdserve.core import SpeculationParams
from hdserve.engine.engine import Engine
from hdserve.engine.host import ModelHost
from hdserve.journal import Journal

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
        gap: the difference of the two tokens' log probabilities there, given the same tokens
            before; a gap near 0 is a tie that rounding decided.
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
        """Whether all are equal, and something was actually drafted and accepted."""
        return self.identical == self.total and self.accepted_tokens > 0


_RESULT: TypeAdapter[SettingResult] = TypeAdapter(SettingResult)


class LosslessCheck:
    """Decodes prompts plainly, drafted with cold databases, and drafted again with the databases
    that this pass has filled.

    Plain and drafted output of a setting are one unit of the journal each: they start with a new
    engine and empty databases, so a result does not depend on where the job was interrupted.

    Args:
        journal: where units are kept and restored from.
        progress: called with the number of sequences that have ended, including restored units.
    """

    def __init__(
        self,
        host: ModelHost,
        prompts: Sequence[EncodedPrompt],
        max_tokens: int,
        *,
        batch_size: int,
        journal: Journal,
        progress: Callable[[int], None],
    ) -> None:
        self._host = host
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._batch_size = batch_size
        self._journal = journal
        self._progress = progress

    def run(self) -> list[SettingResult]:
        """Return the results, greedy and sampled."""
        return [self._run(setting) for setting in SETTINGS]

    def _run(self, setting: str) -> SettingResult:
        num_prompts = len(self._prompts)
        plain = self._unit(f"{setting}, plain", num_prompts, lambda: self._plain(setting))
        result = self._unit(
            f"{setting}, drafted", 2 * num_prompts, lambda: self._drafted(setting, plain)
        )
        return _RESULT.validate_python(result)

    def _unit(self, name: str, num_sequences: int, work: Callable[[], Any]) -> Any:
        if name in self._journal:
            self._progress(num_sequences)
        return self._journal.once(name, work)

    def _plain(self, setting: str) -> list[list[int]]:
        """Return the output token ids of each prompt."""
        return [
            seq.output_token_ids for seq in self._decode(self._engine(), setting, is_drafted=False)
        ]

    def _drafted(self, setting: str, plain: Sequence[list[int]]) -> dict[str, Any]:
        engine = self._engine()
        result = SettingResult(
            setting, str(self._host.model.dtype).removeprefix("torch."), engine.is_exact
        )
        different = set()
        for databases in ("cold", "filled"):
            drafted = self._decode(engine, setting, is_drafted=True)
            _count(result, drafted)
            for index, (wanted, seq) in enumerate(zip(plain, drafted, strict=True)):
                if wanted != seq.output_token_ids:
                    different.add(index)
                    result.first_differences.append(
                        _difference(engine, self._prompts[index], databases, wanted, seq)
                    )
        result.total = len(plain)
        result.identical = len(plain) - len(different)
        result.num_cut_prompts = sum(prompt.is_cut for prompt in self._prompts)
        del result.first_differences[_MAX_SHOWN_DIFFERENCES:]
        return asdict(result)

    def _engine(self) -> Engine:
        self._host.own_database.clear()
        return self._host.make_engine()

    def _decode(self, engine: Engine, setting: str, *, is_drafted: bool) -> list[core.Sequence]:
        """Return the sequences in the order of the prompts; plain output is not added to the
        databases.

        Raises:
            HdserveError: a sequence fails; one that fails plainly and drafted is not lossless.
        """
        speculation = SpeculationParams(is_enabled=is_drafted, is_output_shared=is_drafted)
        sequences = [
            core.Sequence(
                f"{index}",
                list(prompt.token_ids),
                core.SamplingParams(max_tokens=self._max_tokens, seed=index, **SETTINGS[setting]),
                speculation,
            )
            for index, prompt in enumerate(self._prompts)
        ]
        waiting = sequences[::-1]
        num_open = 0
        while waiting or num_open:
            while waiting and num_open < self._batch_size:
                engine.add(waiting.pop())
                num_open += 1
            outputs = checked_step(engine)
            num_ended = sum(output.finish_reason is not None for output in outputs)
            num_open -= num_ended
            self._progress(num_ended)
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
    one: Sequence[int],
    drafted: core.Sequence,
) -> Difference:
    other = drafted.output_token_ids
    position = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    tokens = [ids[position] if position < len(ids) else None for ids in (one, other)]
    gap = None
    if None not in tokens:
        gap = _gap(engine, [*prompt.token_ids, *one[:position]], tokens)
    return Difference(prompt.row.name, databases, position, tokens[0], tokens[1], gap)


def _gap(engine: Engine, token_ids: list[int], choices: Sequence[int | None]) -> float | None:
    """Return the difference of two tokens' log probabilities after ``token_ids``; ``None`` if one
    is not among the likeliest, or nothing can be chosen."""
    seq = core.Sequence(
        "gap",
        list(token_ids),
        core.SamplingParams(max_tokens=1, temperature=0.0, logprobs=core.MAX_TOP_LOGPROBS),
        SpeculationParams(is_enabled=False, is_output_shared=False),
    )
    engine.add(seq)
    found: dict[int, float] = {}
    while seq.finish_reason is None:
        for output in engine.step():
            found |= output.logprobs[0].top if output.logprobs else ()
    values = [found[choice] for choice in choices if choice in found]
    return abs(values[0] - values[1]) if len(values) == 2 else None
