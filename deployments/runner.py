"""What ``hdserve serve`` runs, in a process of its own.

Ray Serve's ``serve run``, but for the end: it kills its HTTP proxies first, and with them every
answer that has begun.  Here the application is taken away first, which its processes take as any
other removal: what they have begun to answer they end, and nothing new reaches them.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus
from ray.serve.scripts import cli

from hdserve.config.deployed import APPLICATION
from hdserve.errors import ConfigError

_POLL_S = 0.1
_BUILD_POLL_S = 1.0
_IDLE_S = 1.0

_OWN_CLUSTER = "local"
_ANSWERING = (ApplicationStatus.RUNNING, ApplicationStatus.UNHEALTHY)


def run_until_interrupted(path: str, address: str, drain_timeout_s: float) -> None:
    """Serve the application of a Serve config file until SIGINT, and end in order.

    Args:
        address: of the Ray cluster to serve on; ``local`` starts one, which ends with this process.
        drain_timeout_s: how long answers that have begun may take.

    Raises:
        ConfigError: the application cannot be built, so that nobody would ever be answered.
    """
    try:
        with until_interrupted():
            _serve(path, address)
        if ray.is_initialized():
            _drain(drain_timeout_s)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if ray.is_initialized():
            if address != _OWN_CLUSTER:
                serve.shutdown()  # type: ignore[no-untyped-call]
            ray.shutdown()


def _serve(path: str, address: str) -> None:
    """Without end.

    Raises:
        ConfigError: see :func:`run_until_interrupted`.
    """
    cli.main(["run", "--non-blocking", "--address", address, path], standalone_mode=False)
    _wait_until_built()
    while True:  # `signal.pause` would miss a signal that comes a moment before it
        time.sleep(_IDLE_S)


@contextmanager
def until_interrupted() -> Iterator[None]:
    """Run a block until SIGINT; from then on the signal is ignored.

    It is a ``KeyboardInterrupt`` there: any other exception would wait for what Ray waits for.  Ray
    and its command may make another one of it.
    """
    is_interrupted = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except BaseException:
        if not is_interrupted:
            raise


def _wait_until_built() -> None:
    """Until the application has deployments, whether they start or not.

    Raises:
        ConfigError: it will have none.
    """
    while True:
        found = serve.status().applications.get(APPLICATION)
        if found is not None and found.deployments:
            return
        if found is not None and found.status == ApplicationStatus.DEPLOY_FAILED:
            reason = found.message.strip().splitlines()[-1]
            raise ConfigError(f"the application was not built: {reason}")
        time.sleep(_BUILD_POLL_S)


def _drain(timeout_s: float) -> None:
    """Take the application away, and wait until its processes have ended."""
    deadline_s = time.monotonic() + timeout_s
    if _status() not in _ANSWERING:
        return
    serve.delete(APPLICATION, _blocking=False)
    while _status() is not None and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)


def _status() -> ApplicationStatus | None:
    found = serve.status().applications.get(APPLICATION)
    return None if found is None else found.status


def main() -> None:
    """With the arguments of :func:`run_until_interrupted` in the command line."""
    path, address, drain_timeout_s = sys.argv[1:]
    try:
        run_until_interrupted(path, address, float(drain_timeout_s))
    except ConfigError as error:
        sys.exit(f"hdserve: {error.message}")
