"""The application that ``hdserve serve`` has deployed, on a cluster of its own or another's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.exceptions import ActorDiedError, RayError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from hdserve.config.deployed import APPLICATION

logger = logging.getLogger(__name__)

_MAX_MISSED_LOOKS = 3


class OwnApplication:
    """It is there until others delete it, or deploy another one in its place."""

    def __init__(self) -> None:
        self._deployed: Any = None
        self._num_missed = 0

    def remember(self) -> None:
        """Take what has its name for it: it has just been deployed."""
        self._deployed = _applications().get(APPLICATION, {}).get("deployed_app_config")

    def is_lost(self) -> bool:
        """Whether it was deleted or replaced, as the last looks have all found.  One that Ray Serve
        does not answer, as while its controller starts again, counts for nothing."""
        try:
            found = _applications().get(APPLICATION)
        except (RayError, RayServeException) as error:
            logger.debug("Ray Serve does not answer: %s", error)
            return False
        is_there = found is not None and not self._is_replaced_by(found)
        self._num_missed = 0 if is_there else self._num_missed + 1
        return self._num_missed >= _MAX_MISSED_LOOKS

    def is_replaced(self) -> bool:
        """Whether others have deployed another one in its place."""
        found = _applications().get(APPLICATION)
        return found is not None and self._is_replaced_by(found)

    def take_away(self, *, with_serve: bool) -> None:
        """Remove it, if it is still there.

        Args:
            with_serve: and Ray Serve itself, unless others are served by now.
        """
        applications = _applications()
        found = applications.pop(APPLICATION, None)
        if found is not None and self._is_replaced_by(found):
            return
        if with_serve and not applications:
            serve.shutdown()  # type: ignore[no-untyped-call]
        elif found is not None:
            serve.delete(APPLICATION)

    def _is_replaced_by(self, found: Mapping[str, Any]) -> bool:
        """What is being deleted has no configuration any more."""
        deployed = found["deployed_app_config"]
        return None not in (deployed, self._deployed) and deployed != self._deployed


def _applications() -> dict[str, Any]:
    """Return the details of all on the cluster; none where Ray Serve does not run, or was ended."""
    client = _get_global_client(raise_if_no_controller_running=False)
    try:
        return {} if client is None else dict(client.get_serve_details()["applications"])
    except ActorDiedError:
        return {}
