"""What ``hdserve bench engine`` compares: ways to decode the same prompts with the same model."""

from __future__ import annotations

import gc
import math
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from transformers import GenerationConfig

from hdserve import core
from hdserve.bench.checked_step import checked_step
from hdserve.bench.prompts import EncodedPrompt
from hdserve.bench.steady_batch import SteadyBatch
from hdserve.bench.task import Decoding, Task
from hdserve.core import DraftCounts, SamplingParams, SpeculationParams
from hdserve.engine.attention.packed import ATTENTION_NAME
from hdserve.engine.engine import Engine
from hdserve.engine.host import ModelHost
from hdserve.engine.linear.shared import linear_layers_of
from hdserve.engine.stats import StepTimes, add_counts

State = Literal["cold", "online", "warm"]

Run = Generator[float, None, "Measurement"]
"""Decodes a slice at a time, yields the share of the tokens done so far, and finally returns the
measurement."""

SLICE_S = 0.2
"""How long one contender decodes before the next one's turn: disturbances on the machine last
longer, and a turn starts with caches that hold another contender's data."""

_LOOKUP_TOKENS = 10

_NO_TOKEN = 1 << 30
"""The end-of-sequence id for ``generate``: in no vocabulary, so that no answer ends early.  With
``None`` transformers would take the model's, and a negative id makes it warn at every
call."""


@dataclass(slots=True)
class Measurement:
    """The measurement of one contender's run over one task.

    Attributes:
        num_steps: forwards that chose tokens, summed over the sequences.
        peak_memory_bytes: of the device, else of the process, including what all contenders hold.
        most_waiting: most sequences of the batch that waited at the same time.
    """

    seconds: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    times: StepTimes = field(default_factory=StepTimes)
    num_engine_steps: int = 0
    peak_memory_bytes: int = 0
    most_waiting: int = 0


class Contender(ABC):
    """One way to decode.

    Attributes:
        max_batch_size: most sequences it can decode together; ``None`` for any.
    """

    max_batch_size: ClassVar[int | None] = None

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def is_able(cls, batch_size: int) -> bool:
        """Return whether it can decode this many sequences together."""
        return cls.max_batch_size is None or batch_size <= cls.max_batch_size

    def begin_round(self) -> None:  # noqa: B027 - optional
        """Reset the databases and what was learned to the state in which a round starts."""

    @abstractmethod
    def run(self, task: Task, decoding: Decoding) -> Run:
        """Decode all prompts of ``task``; closed early, it leaves nothing behind."""


class EngineContender(Contender):
    """hdserve's engine, with drafts or without.

    Args:
        slice_s: how long a slice takes; at least a step.
        memory_share: see :meth:`~hdserve.engine.host.ModelHost.make_engine`.
    """

    def __init__(
        self,
        name: str,
        host: ModelHost,
        *,
        is_drafting: bool,
        state: State,
        slice_s: float = SLICE_S,
        memory_share: float = 1.0,
    ) -> None:
        super().__init__(name)
        self._slice_s = slice_s
        self._host = host
        self._engine: Engine = host.make_engine(is_drafting=is_drafting, memory_share=memory_share)
        self.is_drafting = is_drafting
        self._state = state
        self._filled: list[list[int]] = []
        self._ready: set[str] = set()
        """Namespaces that are in the initial state of a round, or have continued from it."""
        self._emptying_s = 0.0
        """Time spent emptying the model database, which does not count as decoding."""

    @property
    def is_exact(self) -> bool:
        """Whether its forwards are exact."""
        return self._engine.is_exact

    def answers(
        self,
        prompts: Sequence[EncodedPrompt],
        max_tokens: int,
        progress: Callable[[int], None] = lambda num_answered: None,
    ) -> list[list[int]]:
        """Return the token ids of greedy answers to ``prompts``.

        Args:
            progress: told after each step how many prompts are answered.

        Raises:
            HdserveError: a sequence fails.
        """
        task = Task("fill", prompts)
        begin = partial(self._begin, task, Decoding(len(prompts), max_tokens))
        sequences = [begin(number) for number in range(len(prompts))]
        while any(seq.finish_reason is None for seq in sequences):
            checked_step(self._engine)
            progress(sum(seq.finish_reason is not None for seq in sequences))
        return [seq.output_token_ids for seq in sequences]

    def fill_with(self, outputs: Sequence[Sequence[int]]) -> None:
        """Use these answers for the initial state of a warm round."""
        self._filled += [list(output) for output in outputs]

    def begin_round(self) -> None:
        self._ready.clear()
        if self.is_drafting:
            self._host.own_database.clear()

    def run(self, task: Task, decoding: Decoding) -> Run:
        """Decode as many tokens as the answers have, in a batch whose sequences are at different
        points of their answers; after the last prompt, the first come again."""
        stats = self._engine.stats
        found = Measurement()
        num_wanted = task.total_tokens(decoding.max_tokens)
        begin = partial(self._begin, task, decoding)
        with closing(SteadyBatch(self._engine, decoding.batch_size, begin)) as batch:
            batch.lead_in()
            for turn in _turns(task, decoding, batch.num_begun):
                self._make_ready(turn)
            gc.collect()
            times, num_steps = copy(stats.times), stats.num_steps
            self._emptying_s = 0.0
            while batch.num_tokens < num_wanted:
                with _measured(found, self._host.model.device):
                    batch.decode(num_wanted, self._slice_s)
                yield batch.num_tokens / num_wanted
        for seq in batch.sequences:
            add_counts(found.drafts, seq.counts)
        found.seconds -= self._emptying_s
        found.num_tokens = batch.num_tokens
        found.most_waiting = batch.most_waiting
        found.num_steps = found.drafts.num_steps
        found.num_engine_steps = stats.num_steps - num_steps
        found.times = _times_since(times, stats.times)
        return found

    def _make_ready(self, turn: int) -> None:
        """Bring the namespace of a turn to the initial state of a round, at most once per
        round."""
        namespace = _namespace(turn)
        if self.is_drafting and namespace not in self._ready:
            self._ready.add(namespace)
            self._host.apply(self._host.config.name, namespace, self._filled)
            self._engine.drafters.forget(namespace)

    def _begin(
        self, task: Task, decoding: Decoding, number: int, share: float = 1.0
    ) -> core.Sequence:
        """Add the next prompt in turn, to end after a share of its tokens; when one comes again it
        finds nothing from its earlier run."""
        turn, index = divmod(number, len(task.prompts))
        self._make_ready(turn)
        params = SamplingParams(
            temperature=decoding.temperature,
            max_tokens=math.ceil(share * task.num_tokens(index, decoding.max_tokens)),
            ignore_eos=True,
            seed=number,
        )
        recorded = None if task.recorded is None else tuple(task.recorded[index])
        seq = core.Sequence(
            f"{task.name}/{number}",
            list(task.prompts[index].token_ids),
            params,
            SpeculationParams(is_enabled=self.is_drafting, is_output_shared=self.is_drafting),
            namespace=_namespace(turn),
            recorded_token_ids=recorded,
        )
        if self.is_drafting and self._state == "cold":
            started = time.perf_counter()
            self._host.own_database.clear()
            self._emptying_s += time.perf_counter() - started
        self._engine.add(seq)
        return seq


def _namespace(turn: int) -> str:
    """Return the namespace of the prompts when they are decoded for the first time, the second, and
    so on."""
    return f"again {turn}" if turn else core.DEFAULT_NAMESPACE


def _turns(task: Task, decoding: Decoding, num_begun: int) -> range:
    """Return the turns in which prompts will probably start while as many tokens are decoded as the
    answers have, after ``num_begun`` prompts: all, and those of a batch that does not end."""
    num_prompts = len(task.prompts)
    last = num_begun + num_prompts - 1 + 2 * (decoding.batch_size - 1)
    return range(num_begun // num_prompts, last // num_prompts + 1)


class GenerateContender(Contender):
    """Stock ``generate`` of transformers, plain or with prompt lookup; what it drafted is counted
    by the rows of its forwards.

    What the model's own generation config asks for, such as a penalty, is left out as for hdserve's
    contenders.  Layers with prepacked weights return them in PyTorch's order, and then multiply as
    PyTorch does.
    """

    max_batch_size = 1

    def __init__(self, name: str, host: ModelHost, *, looks_up: bool) -> None:
        super().__init__(name)
        self._host = host
        self._looks_up = looks_up
        self._has_run = False
        for layer in linear_layers_of(host.model.module):
            _ = layer.weight

    def run(self, task: Task, decoding: Decoding) -> Run:
        """Decode one prompt after the other, each in its own slice.  What only the first call does,
        the first round leaves out, as for hdserve's contenders."""
        if not self._has_run:
            with self._stock(Measurement()):
                self._generate(task.prompts[0], 2, decoding.temperature)
            self._has_run = True
        found = Measurement()
        num_wanted = task.total_tokens(decoding.max_tokens)
        gc.collect()
        for index, prompt in enumerate(task.prompts):
            num_tokens = task.num_tokens(index, decoding.max_tokens)
            with self._stock(found), _measured(found, self._host.model.device):
                found.num_tokens += self._generate(prompt, num_tokens, decoding.temperature)
            num_read = len(prompt.token_ids) - 1
            found.drafts.num_draft_tokens -= num_read  # rows of a prompt are no drafts
            yield found.num_tokens / num_wanted
        found.num_engine_steps = found.num_steps
        return found

    @contextmanager
    def _stock(self, found: Measurement) -> Iterator[None]:
        """Let transformers run the module unchanged, with the attention that a load by
        transformers chooses; its forwards are counted."""
        module: Any = self._host.model.module

        def count(_module: torch.nn.Module, _arguments: Any, inputs: dict[str, Any]) -> None:
            found.num_steps += 1
            found.drafts.num_draft_tokens += inputs["input_ids"].shape[1] - 1

        handle = module.register_forward_pre_hook(count, with_kwargs=True)
        own_config = module.generation_config
        make_config: Any = GenerationConfig
        module.generation_config = make_config()  # the source of options a call does not set
        module.set_attn_implementation(module.get_correct_attn_implementation(None))
        try:
            yield
        finally:
            module.set_attn_implementation(ATTENTION_NAME)
            module.generation_config = own_config
            handle.remove()

    @torch.inference_mode()
    def _generate(self, prompt: EncodedPrompt, num_tokens: int, temperature: float) -> int:
        module: Any = self._host.model.module
        options: dict[str, Any] = {"do_sample": temperature > 0.0}
        if temperature > 0.0:
            options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        if self._looks_up:
            options["prompt_lookup_num_tokens"] = _LOOKUP_TOKENS
        ids = torch.tensor([prompt.token_ids], device=self._host.model.device)
        make_config: Any = GenerationConfig
        output = module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=make_config(
                max_new_tokens=num_tokens, eos_token_id=_NO_TOKEN, pad_token_id=0, **options
            ),
        )
        return int(output.shape[1] - ids.shape[1])


@contextmanager
def _measured(found: Measurement, device: torch.device) -> Iterator[None]:
    """Add the time of a slice, and the memory at its peak."""
    reset_peak_memory()
    started = time.perf_counter()
    yield
    found.seconds += time.perf_counter() - started
    found.peak_memory_bytes = max(found.peak_memory_bytes, peak_memory_bytes(device))


def _times_since(before: StepTimes, now: StepTimes) -> StepTimes:
    """Return the times spent between two readings."""
    return StepTimes(
        draft_s=now.draft_s - before.draft_s,
        forward_s=now.forward_s - before.forward_s,
        verify_s=now.verify_s - before.verify_s,
    )


def reset_peak_memory() -> None:
    """Restart the measurement of the peak, if the system can."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak of memory since the last reset: of the device's allocator, else of this
    process, whatever uses the memory in it."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
