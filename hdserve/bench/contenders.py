"""What ``hdserve bench engine`` compares: ways to decode the same prompts with the same model."""

from __future__ import annotations

import gc
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from transformers import GenerationConfig

from hdserve import core
from hdserve.bench.prompts import EncodedPrompt
from hdserve.core import DraftCounts, SamplingParams, SpeculationParams
from hdserve.drafting.calibration import Calibration
from hdserve.drafting.hierarchy import Hierarchy
from hdserve.drafting.states import pack_states
from hdserve.engine.attention import ATTENTION_NAME
from hdserve.engine.engine import Engine
from hdserve.engine.host import ModelHost
from hdserve.engine.stats import StepTimes, add_counts

State = Literal["cold", "online", "warm"]

_LOOKUP_TOKENS = 10


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts that are decoded together, each to the same number of tokens.

    Attributes:
        recorded: per prompt the tokens that count as the model's choices; ``None`` lets it choose.
    """

    name: str
    prompts: Sequence[EncodedPrompt]
    recorded: Sequence[Sequence[int]] | None = None

    def num_tokens(self, index: int, max_tokens: int) -> int:
        """Tokens of answer ``index``."""
        if self.recorded is None:
            return max_tokens
        return min(max_tokens, len(self.recorded[index]))


@dataclass(slots=True)
class Measurement:
    """One contender's run over one task.

    Attributes:
        num_steps: forwards that chose tokens, summed over the sequences.
    """

    seconds: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    times: StepTimes = field(default_factory=StepTimes)
    num_engine_steps: int = 0
    peak_memory_bytes: int = 0


class Contender(ABC):
    """One way to decode.

    Attributes:
        max_batch_size: most sequences it can decode together; ``None`` for any.
    """

    max_batch_size: ClassVar[int | None] = None

    def __init__(self, name: str) -> None:
        self.name = name

    def begin_round(self) -> None:  # noqa: B027 - optional
        """Bring the databases and what was learned to the state a round begins with."""

    @abstractmethod
    def run(
        self, task: Task, batch_size: int, max_tokens: int, sampling: dict[str, Any]
    ) -> Measurement:
        """Decode all prompts of ``task``."""


class EngineContender(Contender):
    """hdserve's engine, with drafts or without."""

    def __init__(self, name: str, host: ModelHost, *, is_drafting: bool, state: State) -> None:
        super().__init__(name)
        self._host = host
        self._engine: Engine = host.make_engine(is_drafting=is_drafting)
        self.is_drafting = is_drafting
        self._state = state
        self._filled: list[list[int]] = []

    @property
    def is_exact(self) -> bool:
        """Whether its forwards are."""
        return self._engine.is_exact

    def answers(self, prompts: Sequence[EncodedPrompt], max_tokens: int) -> list[list[int]]:
        """The token ids of greedy answers to ``prompts``."""
        sequences = self._decode(Task("fill", prompts), 8, max_tokens, {"temperature": 0.0})
        return [seq.output_token_ids for seq in sequences]

    def fill_with(self, outputs: Sequence[Sequence[int]]) -> None:
        """Take answers for what a warm round begins with."""
        self._filled += [list(output) for output in outputs]

    def begin_round(self) -> None:
        if self.is_drafting:
            self._host.own_database.clear()
            self._host.apply(self._host.config.name, core.DEFAULT_NAMESPACE, self._filled)
            shipped = Calibration.prior(self._host.model.vocab_size).to_bytes()
            states = pack_states({Hierarchy.name: shipped})
            self._engine.adopt_drafter_states(core.DEFAULT_NAMESPACE, states)

    def run(
        self, task: Task, batch_size: int, max_tokens: int, sampling: dict[str, Any]
    ) -> Measurement:
        stats = self._engine.stats
        before = (stats.times.draft_s, stats.times.forward_s, stats.times.verify_s)
        num_steps = stats.num_steps
        reset_peak_memory()
        started = time.perf_counter()
        sequences = self._decode_steadily(task, batch_size, max_tokens, sampling)
        seconds = time.perf_counter() - started
        for seq in sequences:
            if seq.finish_reason is None:
                self._engine.abort(seq.request_id)
        found = Measurement(
            seconds=seconds,
            num_tokens=sum(seq.num_output_tokens for seq in sequences),
            num_engine_steps=stats.num_steps - num_steps,
            peak_memory_bytes=peak_memory_bytes(self._host.model.device),
        )
        for seq in sequences:
            add_counts(found.drafts, seq.counts)
        found.num_steps = found.drafts.num_steps
        times = StepTimes(
            draft_s=stats.times.draft_s - before[0],
            forward_s=stats.times.forward_s - before[1],
            verify_s=stats.times.verify_s - before[2],
        )
        times.rest_s = seconds - times.draft_s - times.forward_s - times.verify_s
        found.times = times
        return found

    def _decode(
        self, task: Task, batch_size: int, max_tokens: int, sampling: dict[str, Any]
    ) -> list[core.Sequence]:
        """Every prompt to its end."""
        sequences = [
            self._sequence(task, number, max_tokens, sampling)
            for number in range(len(task.prompts))
        ]
        waiting = sequences[::-1]
        num_open = 0
        while waiting or num_open:
            while waiting and num_open < batch_size:
                self._add(waiting.pop())
                num_open += 1
            num_open -= sum(out.finish_reason is not None for out in self._engine.step())
        return sequences

    def _decode_steadily(
        self, task: Task, batch_size: int, max_tokens: int, sampling: dict[str, Any]
    ) -> list[core.Sequence]:
        """As many tokens as the answers have, by ``batch_size`` sequences from the first to the
        last: as sequences end, others begin, and when all prompts have been, the first come again.

        Else the last sequences would decode with fewer and fewer beside them, drafted ones longer
        than plain ones, which all end together.
        """
        num_left = sum(task.num_tokens(index, max_tokens) for index in range(len(task.prompts)))
        sequences: list[core.Sequence] = []
        num_open = 0
        while num_left > 0:
            while num_open < batch_size:
                sequences.append(self._sequence(task, len(sequences), max_tokens, sampling))
                self._add(sequences[-1])
                num_open += 1
            for output in self._engine.step():
                num_left -= len(output.token_ids)
                num_open -= output.finish_reason is not None
        return sequences

    def _add(self, seq: core.Sequence) -> None:
        if self.is_drafting and self._state == "cold":
            self._host.own_database.clear()
        self._engine.add(seq)

    def _sequence(
        self, task: Task, number: int, max_tokens: int, sampling: dict[str, Any]
    ) -> core.Sequence:
        """For the prompts in turns; one that comes again finds nothing of what it had."""
        turn, index = divmod(number, len(task.prompts))
        num_tokens = task.num_tokens(index, max_tokens)
        recorded = None if task.recorded is None else tuple(task.recorded[index])
        return core.Sequence(
            f"{task.name}/{number}",
            list(task.prompts[index].token_ids),
            SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=number, **sampling),
            SpeculationParams(is_enabled=self.is_drafting, is_output_shared=self.is_drafting),
            namespace=f"again {turn}" if turn else core.DEFAULT_NAMESPACE,
            recorded_token_ids=recorded,
        )


class GenerateContender(Contender):
    """Stock ``generate`` of transformers, plain or with prompt lookup."""

    max_batch_size = 1

    def __init__(self, name: str, host: ModelHost, *, looks_up: bool) -> None:
        super().__init__(name)
        self._host = host
        self._looks_up = looks_up

    def run(
        self, task: Task, batch_size: int, max_tokens: int, sampling: dict[str, Any]
    ) -> Measurement:
        module: Any = self._host.model.module
        module.set_attn_implementation("sdpa")
        counter = _ForwardCounter(module)
        reset_peak_memory()
        found = Measurement()
        started = time.perf_counter()
        try:
            for index, prompt in enumerate(task.prompts):
                num_tokens = task.num_tokens(index, max_tokens)
                found.num_tokens += self._generate(module, prompt, num_tokens, sampling)
        finally:
            found.seconds = time.perf_counter() - started
            counter.remove()
            module.set_attn_implementation(ATTENTION_NAME)
        found.num_steps = counter.num_forwards
        found.times.rest_s = found.seconds
        found.num_engine_steps = counter.num_forwards
        found.peak_memory_bytes = peak_memory_bytes(self._host.model.device)
        return found

    @torch.inference_mode()
    def _generate(
        self, module: Any, prompt: EncodedPrompt, num_tokens: int, sampling: dict[str, Any]
    ) -> int:
        temperature = sampling.get("temperature", 0.0)
        options: dict[str, Any] = {"do_sample": temperature > 0.0}
        if temperature > 0.0:
            options |= {"temperature": temperature, "top_k": 0, "top_p": sampling.get("top_p", 1.0)}
        if self._looks_up:
            options["prompt_lookup_num_tokens"] = _LOOKUP_TOKENS
        ids = torch.tensor([prompt.token_ids], device=self._host.model.device)
        make_config: Any = GenerationConfig
        output = module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=make_config(
                max_new_tokens=num_tokens, eos_token_id=None, pad_token_id=0, **options
            ),
        )
        return int(output.shape[1] - ids.shape[1])


class _ForwardCounter:
    """Counts the forwards of a module while it is attached."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.num_forwards = 0
        self._handle = module.register_forward_pre_hook(self._count)

    def _count(self, _module: torch.nn.Module, _arguments: Any) -> None:
        self.num_forwards += 1

    def remove(self) -> None:
        self._handle.remove()


def reset_peak_memory() -> None:
    """Begin a new peak, where the system can."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def peak_memory_bytes(device: torch.device) -> int:
    """The peak since the last reset: of the device's allocator, else of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
