"""The statistics database goes away under those who map it."""

from __future__ import annotations

import shutil
from pathlib import Path

from hdserve.models import bundled_statistics
from tests.chaos.fault import Trial
from tests.chaos.faults.killed import ReplicaKilled
from tests.chaos.system import Config, System


class CorpusMissing(ReplicaKilled):
    """The directory is deleted, and a replica starts without it."""

    name = "corpus-missing"
    setting = "own corpus"

    @classmethod
    def configure(cls, system: System, config: Config) -> Config:
        config["models"][0]["statistics"] = str(_directory(system))
        _restore(system)
        return config

    def inject(self, trial: Trial) -> None:
        shutil.rmtree(_directory(trial.system), ignore_errors=True)
        super().inject(trial)

    def check(self, trial: Trial) -> None:
        super().check(trial)
        _restore(trial.system)


def _directory(system: System) -> Path:
    return system.directory / "corpus"


def _restore(system: System) -> None:
    if not _directory(system).exists():
        shutil.copytree(bundled_statistics()[0], _directory(system))
