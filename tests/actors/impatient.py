"""Actors that hardly wait for files that another one has, in tests where it keeps them."""

from __future__ import annotations

from functools import partial
from typing import Any

from actors import model_database_actor
from actors.model_database_actor import ModelDatabaseActor
from hdserve.databases.output_store import OutputStore

impatient_store = partial(OutputStore, lock_timeout_s=0.2)


class ImpatientDatabaseActor(ModelDatabaseActor):
    """Runs in a process of its own, which has no others."""

    def __init__(self, *args: Any) -> None:
        model_database_actor.OutputStore = impatient_store  # type: ignore[assignment, misc]
        super().__init__(*args)
