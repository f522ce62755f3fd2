"""What a fault is, and what it may see of the trial it is part of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tests.chaos.load import Load
from tests.chaos.questions import Question
from tests.chaos.system import Config, System


@dataclass(slots=True)
class Trial:
    """One fault under way.

    Attributes:
        number: of the trial, from 0.
        namespace: in which its load generates, and nothing else does.
        happened_s: when the fault happened, if there was something to wait for before it.
        dead_s: when the process concerned had ended, if it did not at once.
        asked_again: questions that were asked once more after the fault.
        details: what the fault has to say, for the record.
        violations: what must not happen and did.
    """

    number: int
    namespace: str
    system: System
    load: Load
    questions: Sequence[Question]
    happened_s: float = 0.0
    dead_s: float = 0.0
    asked_again: set[int] = field(default_factory=set)
    details: dict[str, Any] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def expect(self, is_so: bool, violation: str) -> None:
        """Note ``violation`` unless ``is_so``."""
        if not is_so:
            self.violations.append(violation)

    def missing_outputs(self, indices: Sequence[int]) -> list[int]:
        """The questions whose right answers the model database lacks."""
        kept = self.system.outputs(self.namespace)
        return [index for index in indices if not _is_kept(self.questions[index], kept)]


def _is_kept(question: Question, outputs: Sequence[Sequence[int]]) -> bool:
    """Whether one of ``outputs`` begins with the right answer, which it may end with a token of its
    own."""
    answer = list(question.token_ids)
    return any(list(output[: len(answer)]) == answer for output in outputs)


class Fault(ABC):
    """One kind of fault.  An instance serves one trial.

    Attributes:
        name: of the fault, in commands and records.
        setting: what kind of system it needs; faults of one setting share systems.
        num_workers, gcs_storage: as of :class:`System`.
        may_lose_requests: whether requests under way on the dead process may be lost.
        may_refuse: whether requests may fail until everything is as before, because Ray Serve still
            sends them to a process that is gone.
        may_lose_outputs: whether the database may lack what a dead replica had not yet published.
        keeps_system: whether the next trial may use the same cluster.
    """

    name: ClassVar[str]
    setting: ClassVar[str] = "one node"
    num_workers: ClassVar[int] = 0
    gcs_storage: ClassVar[bool] = False
    may_lose_requests: ClassVar[bool] = False
    may_refuse: ClassVar[bool] = False
    may_lose_outputs: ClassVar[bool] = False
    keeps_system: ClassVar[bool] = True

    @classmethod
    def obstacle(cls) -> str:
        """Why this machine cannot provoke the fault; empty if it can."""
        return ""

    @classmethod
    def environment(cls, system_directory: Any) -> dict[str, str]:
        """Environment variables of every process of the cluster."""
        return {}

    @classmethod
    def configure(cls, system: System, config: Config) -> Config:
        """The configuration the system starts with."""
        return config

    @abstractmethod
    def inject(self, trial: Trial) -> None:
        """Do it."""

    @abstractmethod
    def is_recovered(self, trial: Trial) -> bool:
        """Whether everything is as before; asked again and again."""

    def check(self, trial: Trial) -> None:
        """Look at what only this fault shows, after the recovery and while the load goes on."""
        return
