"""Receivers of what mirrors hear."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hdserve.config import ModelDatabaseConfig


class Replica:
    """A receiver that keeps what it is told."""

    def __init__(self) -> None:
        self.outputs: list[tuple[str, str, list[int]]] = []
        self.calibrations: list[tuple[str, str, bytes]] = []
        self.forgotten: list[tuple[str, str]] = []

    def deliver(self, model: str, namespace: str, outputs: list[np.ndarray]) -> None:
        self.outputs += [(model, namespace, output.tolist()) for output in outputs]

    def is_behind(self) -> bool:
        return False

    def deliver_calibration(self, model: str, namespace: str, calibration: bytes) -> None:
        self.calibrations.append((model, namespace, calibration))

    def forget(self, model: str, namespace: str) -> None:
        self.forgotten.append((model, namespace))

    def texts(self, namespace: str = "n") -> list[list[int]]:
        return [ids for _, name, ids in self.outputs if name == namespace]


class Brittle(Replica):
    """A receiver that fails at the first delivery."""

    def deliver(self, model: str, namespace: str, outputs: list[np.ndarray]) -> None:
        is_first = not self.outputs
        super().deliver(model, namespace, outputs)
        if is_first:
            raise RuntimeError("no")


def quick_config(directory: Path, **settings: float) -> ModelDatabaseConfig:
    """One with which nobody waits long."""
    return ModelDatabaseConfig(
        snapshot_dir=directory,
        publish_interval_s=0.05,
        poll_interval_s=0.1,
        snapshot_interval_s=0.2,
        **settings,
    )
