"""The process that ``hdserve serve`` starts.

It is Ray Serve's ``serve run``, except for the end: that kills its HTTP proxies first, and with
them every answer in progress, and whatever else is served on the cluster.  Here gateways are told
to refuse new requests, with 503, and when they have finished all others the application is removed.
Other applications are not touched.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray import serve
from ray.exceptions import ActorDiedError, RayError
from ray.serve._private.common import DeploymentStatus, ReplicaState
from ray.serve.context import _get_global_client
from ray.serve.schema import (
    APIType,
    ApplicationStatus,
    ApplicationStatusOverview,
    HTTPOptionsSchema,
    ServeDeploySchema,
)

from deployments.announcement import announce, url_of
from deployments.nodes import all_resources
from deployments.own_application import OwnApplication
from deployments.ray_token import close_token
from hdserve.cluster_address import TOKEN_HINT
from hdserve.config.deployed import (
    APPLICATION,
    GATEWAY_DEPLOYMENT,
    OWN_CLUSTER,
    read_deployed_config,
)
from hdserve.doctor.capacity import compare_resources
from hdserve.doctor.finding import Verdict
from hdserve.doctor.gpus import with_gpus
from hdserve.errors import ConfigError
from hdserve.process_session import kill_session

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_BUILD_POLL_S = 1.0
_IDLE_S = 5.0
_ANSWER_TIMEOUT_S = 10.0

_BEFORE_AN_ERROR = re.compile(
    r"Traceback \(most recent call last\):\n"
    r"|The above exception was the direct cause of the following exception:\n"
    r"|During handling of the above exception, another exception occurred:\n"
)
_OWN_ERROR = re.compile(r"^hdserve\.errors\.\w+: (.+)", re.DOTALL | re.MULTILINE)

_NAMESPACE = "serve"
_ANSWERING = (ApplicationStatus.RUNNING, ApplicationStatus.UNHEALTHY)


def run_until_interrupted(path: str, address: str, drain_timeout_s: float) -> None:
    """Serve the application of a Serve config file until SIGINT, and end in order; with SIGTERM
    then without waiting for answers.

    Args:
        address: of the Ray cluster to serve on; ``local`` starts one, which ends with this process.
        drain_timeout_s: how long answers in progress may take.

    Raises:
        ConfigError: the application cannot be built, or a model cannot be loaded, so that nobody
            would ever be answered; or it would replace another application on the cluster, or was
            deleted or replaced itself there.
    """
    own, ending = OwnApplication(), ExitStack()
    try:
        with until_interrupted():
            _serve(path, address, own, ending)
        if ray.is_initialized():
            with until_interrupted(signal.SIGTERM):
                if not own.is_replaced():
                    _drain(drain_timeout_s)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        ending.close()
        ray.shutdown()


def _serve(path: str, address: str, own: OwnApplication, ending: ExitStack) -> None:
    """Serve until the application is deleted, or replaced on another's cluster, from elsewhere.

    Args:
        own: remembers it there, once it is deployed; on a cluster that ends with this process what
            others deploy in its place is served as it was.
        ending: gets the callbacks that remove what was started on another's cluster.

    Raises:
        ConfigError: see :func:`run_until_interrupted`.
    """
    schema = ServeDeploySchema.model_validate_json(Path(path).read_bytes())
    if address == OWN_CLUSTER:
        close_token()
    try:
        ray.init(address, namespace=_NAMESPACE)
    except (ConnectionError, ValueError, RayError) as error:
        if address == OWN_CLUSTER:
            raise
        hint = f"; {TOKEN_HINT}" if isinstance(error, ConnectionError) else ""
        raise ConfigError(f"no Ray cluster is reached at {address}: {error}{hint}") from error
    if address == OWN_CLUSTER:
        _check_room(path)
    else:
        client = _client()
        if client is not None:
            (application,) = schema.applications
            others = client.get_serve_details()["applications"]
            _check_replaces_nothing(others, application.route_prefix)
            _check_listens_there(schema.http_options, client.http_config)
        ending.callback(own.take_away, with_serve=client is None)
    serve.start(schema.proxy_location, schema.http_options.model_dump())
    client = _client()
    base_url = url_of(client.http_config.host, client.http_config.port)
    threading.Thread(target=announce, args=(base_url,), daemon=True).start()
    client.deploy_apps(schema)
    if address != OWN_CLUSTER:
        own.remember()
    _wait_until_it_runs(own)
    while not own.is_lost():
        time.sleep(_IDLE_S)  # `signal.pause` would miss a signal that arrives just before it
    raise ConfigError(
        f"the application {APPLICATION!r} of this server was deleted, or replaced by another, with "
        "a command of Ray Serve: the server ends"
    )


@contextmanager
def until_interrupted(awaited: signal.Signals = signal.SIGINT) -> Iterator[None]:
    """Run a block until that signal; from then on it is ignored.

    In the block it is a ``KeyboardInterrupt``: any other exception would wait for what Ray waits
    for. Ray and its command may turn it into another one.
    """
    is_interrupted = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        signal.signal(awaited, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(awaited, interrupt)
    try:
        yield
    except BaseException:
        if not is_interrupted:
            raise


def _check_room(path: str) -> None:
    """Check that a cluster that consists of this node, and never grows, has room for the
    application.

    Raises:
        ConfigError: a process of the application would wait for resources for ever.
    """
    try:
        config = read_deployed_config(path).config
    except ConfigError:
        return  # reported when the application is built
    nodes = all_resources()
    for found in compare_resources(with_gpus(config, nodes), nodes, "this machine"):
        if found.verdict is Verdict.FAILURE:
            raise ConfigError(f"{found.subject}: {found.text}\n  to mend it: {found.remedy}")


def _wait_until_it_runs(own: OwnApplication) -> None:
    """Wait until each deployment has what it needs to start, or the application is lost.

    Raises:
        ConfigError: one never will: Ray Serve has tried to start it a few times, and given up.
    """
    while not own.is_lost():
        found = _application()
        if found is not None and found.status in _ANSWERING:
            return
        if found is not None and found.status == ApplicationStatus.DEPLOY_FAILED:
            messages = {
                name: deployment.message
                for name, deployment in found.deployments.items()
                if deployment.status == DeploymentStatus.DEPLOY_FAILED
            }
            told = [f"{name} does not start: {_reason(m)}" for name, m in messages.items()]
            built = f"the application was not built: {_reason(found.message)}"
            raise ConfigError("; ".join(told) or built)
        time.sleep(_BUILD_POLL_S)


def _reason(message: str) -> str:
    """Return an error of ours that ends the last traceback, as one line and without its class; of
    another error, the last line."""
    last = _BEFORE_AN_ERROR.split(message.strip())[-1]
    ours = _OWN_ERROR.search(last)
    return " ".join(ours[1].split()) if ours else last.splitlines()[-1]


def _client() -> Any:
    """Return the client of Ray Serve on the cluster; ``None`` if Ray Serve does not run."""
    return _get_global_client(raise_if_no_controller_running=False)


def _check_replaces_nothing(
    applications: Mapping[str, Mapping[str, Any]], route_prefix: str | None
) -> None:
    """Check that deploying removes no other application, and takes no requests from one.

    Args:
        route_prefix: where this application is to answer.

    Raises:
        ConfigError: Ray Serve would remove one of ``applications``: each name exists only once, and
            of those deployed by a file it keeps only what the last file names.  Or one answers at
            ``route_prefix``, such as ours under another name from ``serve run``.
    """
    for name, details in applications.items():
        if name == APPLICATION or details["source"] == APIType.DECLARATIVE:
            raise ConfigError(
                f"Ray Serve on this cluster serves {name!r} already, which would be replaced: end "
                "it first, or have one file name both for `serve deploy`"
            )
        if details.get("route_prefix") == route_prefix:
            raise ConfigError(
                f"Ray Serve on this cluster serves {name!r} at {route_prefix} already, where this "
                "server is to answer: end it first"
            )


def _check_listens_there(wanted: HTTPOptionsSchema, found: Any) -> None:
    """Check that a Ray Serve that runs already listens where this server is to: it cannot be moved.

    Args:
        wanted: a host or port that it leaves out may be any.
        found: the HTTP options of Ray Serve.

    Raises:
        ConfigError: it listens elsewhere, perhaps at every interface.
    """
    chosen = wanted.model_dump(include=wanted.model_fields_set & {"host", "port"})
    host, port = chosen.get("host", found.host), chosen.get("port", found.port)
    if (host, port) != (found.host, found.port):
        raise ConfigError(
            f"Ray Serve on this cluster listens on {found.host}, port {found.port}, already, and "
            f"not on {host}, port {port}: give --host {found.host} --port {found.port}, or end it "
            "first"
        )


def _drain(timeout_s: float) -> None:
    """Let answers in progress finish, remove the application, and wait until its processes have
    ended. If nobody can answer anything, nothing is waited for."""
    deadline_s = time.monotonic() + timeout_s
    found = _application()
    if found is None or not _answers(found):
        return
    _close_gateways(deadline_s)
    serve.delete(APPLICATION, _blocking=False)
    while _application() is not None and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)


def _answers(application: ApplicationStatusOverview) -> bool:
    """Whether there is a gateway, and a model that answers; others may still be loading."""
    if application.status in _ANSWERING:
        return True
    running = {
        name
        for name, deployment in application.deployments.items()
        if deployment.replica_states.get(ReplicaState.RUNNING)
    }
    return GATEWAY_DEPLOYMENT in running and len(running) > 1


def _close_gateways(deadline_s: float) -> None:
    """Make gateways refuse new requests, and wait until they have finished all others.  A gateway
    removed while a request arrives would wait for a replica that never comes."""
    try:
        gateways = serve.get_deployment_handle(GATEWAY_DEPLOYMENT, APPLICATION)
        _ask_all(gateways, "close")
        while time.monotonic() < deadline_s and any(_ask_all(gateways, "num_answering")):
            time.sleep(_POLL_S)
    except Exception as error:  # anything from Ray: they are gone, or do not answer
        logger.warning("the gateways were not told that the server ends: %s", error)


def _ask_all(handle: Any, method: str) -> list[Any]:
    answers: list[Any] = handle.broadcast(method).results(timeout_s=_ANSWER_TIMEOUT_S)
    return answers


def _application() -> ApplicationStatusOverview | None:
    """Return what is known of it; ``None`` if it is not there, or Ray Serve was ended."""
    try:
        return serve.status().applications.get(APPLICATION)
    except ActorDiedError:
        return None


def main() -> None:
    """Call :func:`run_until_interrupted` with the arguments of the command line.

    If there is a fourth argument, another process holds the other end of standard input, and this
    one leads its own session and has a directory for its arguments.  If the other process is
    killed, this one ends in order too, and what is left of the session is killed that many seconds
    after ``drain_timeout_s``.
    """
    path, address, drain_timeout_s, *end_timeout_s = sys.argv[1:]
    is_alone = threading.Event()
    if end_timeout_s:
        limit_s = float(drain_timeout_s) + float(end_timeout_s[0])
        arguments = (is_alone, limit_s, Path(path).parent)
        threading.Thread(target=_end_when_alone, args=arguments, daemon=True).start()
    try:
        run_until_interrupted(path, address, float(drain_timeout_s))
    except ConfigError as error:
        sys.exit(f"hdserve: {error.message}")
    finally:
        if is_alone.is_set():
            _end_session(Path(path).parent)


def _end_when_alone(is_alone: threading.Event, limit_s: float, directory: Path) -> None:
    """Wait for the end of standard input, bypassing the buffer of ``sys.stdin``: Python would abort
    at exit while a thread holds that."""
    while os.read(0, 1):
        pass
    is_alone.set()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(limit_s)
    _end_session(directory)


def _end_session(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    if os.getsid(0) == os.getpid():
        kill_session(os.getpid())
