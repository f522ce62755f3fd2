"""The settings that an actor keeps from when it was started, whatever is deployed later."""

from __future__ import annotations

import logging
import shlex
from contextlib import suppress
from typing import Any

import ray

from hdserve.config import ModelDatabaseConfig
from hdserve.databases.snapshot import DatabaseKey

logger = logging.getLogger(__name__)

_NAMES = {
    "max_bytes",
    "max_total_bytes",
    "snapshot_dir",
    "snapshot_interval_s",
    "poll_interval_s",
    "num_cpus",
    "resources",
}
_TIMEOUT_S = 10.0


def actor_settings(config: ModelDatabaseConfig) -> dict[str, Any]:
    """Those settings of ``config`` that the actor reads, not the replicas, as simple types."""
    return config.model_dump(mode="json", include=_NAMES)


def warn_of_other_settings(actor: Any, key: DatabaseKey, config: ModelDatabaseConfig) -> bool:
    """Log which settings of ``config`` a model database's actor does not use; whether it said what
    it uses.

    It is not told to change: during an update replicas of both configurations use it.  If it does
    not say what it uses, that is logged, and it is used all the same.
    """
    wanted, answer = actor_settings(config), actor.info.remote()
    try:
        kept = dict(ray.get(answer, timeout=_TIMEOUT_S)["settings"])
    except Exception as error:
        with suppress(Exception):
            ray.cancel(answer)  # it may not have begun, and is asked again
        told = "the model database of %s does not say which settings it uses: %r"
        logger.warning(told, key.model, error)
        return False
    differences = [
        f"model_database.{name} {kept[name]}, not {value}"
        for name, value in wanted.items()
        if name in kept and kept[name] != value
    ]
    if differences:
        logger.warning(
            "the model database of %s keeps the settings it was started with: %s; when no replica "
            "with the old settings is left, `hdserve database stop --model %s` has it started anew",
            key.model,
            "; ".join(differences),
            shlex.quote(key.model),
        )
    return True
