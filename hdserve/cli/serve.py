"""``hdserve serve``: Ray Serve with this application, until a signal ends it in order."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Annotated, Any

import typer

from hdserve.cli.config import warn_of_relative_paths, warn_of_settings
from hdserve.cli.model_option import directory_of
from hdserve.cli.model_settings import Settings, parse_settings
from hdserve.cli.options import ConfigFile
from hdserve.cli.own_cluster import directory_variables, token_variables
from hdserve.cli.proxy import private_directory, proxy_variables
from hdserve.cluster_address import why_unanswered
from hdserve.config import ServeConfig, load_config
from hdserve.config.deployed import DEFAULT_PORT, GRPC_VARIABLES, OWN_CLUSTER, application_of
from hdserve.config.loading import access_variables, configured_path
from hdserve.config.mistakes import LineOf, nowhere
from hdserve.config.strict_yaml import line_of as yaml_line_of
from hdserve.config.strict_yaml import read_text
from hdserve.doctor.problems import find_faults
from hdserve.errors import ConfigError
from hdserve.ports import reservation_error
from hdserve.process_session import kill_session
from hdserve.shadows import shadows
from hdserve.telemetry import check_tracing

END_TIMEOUT_S = 10.0
"""How long Ray Serve may take to end after all answers have ended; then it is killed."""

REMOVAL_TIMEOUT_S = 5.0
"""How long it may take to ask another's cluster to remove the application."""

_RUNNER = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "  # importing Ray takes seconds
    "from deployments.runner import main; main()"
)
_POLL_S = 0.1

Source = Path | dict[str, Any] | None
"""A file with a configuration, or its content; ``None`` for the bundled models."""


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A bundled model, a directory or a Hugging Face id, served instead of a "
            "configuration, with all defaults but --set.",
            show_default=False,
        ),
    ] = None,
    config: ConfigFile = None,
    settings: Settings = None,
    host: Annotated[
        str, typer.Option(help="The address to listen at; 0.0.0.0 is every interface.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            help="The port to listen at; default: 8000, or that of a Ray Serve that runs on the "
            "cluster already.",
            min=1,
            max=65535,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serve a model, or those of a configuration, until Ctrl-C; by default the bundled ones.

    MODEL has all defaults but those that --set changes: `--set engine.max_num_sequences=32 --set
    reasoning_parser=auto`.  docs/configuration.md has the keys, those of `models[]`.

    Runs on the Ray cluster RAY_ADDRESS names, or on one that is started with it and ends with it;
    says when the models answer.  If Ray Serve already runs there, it listens where it was told to:
    another host or port is refused.  Ctrl-C lets answers that have begun end, for `drain_timeout_s`
    of the configuration at most; a second one ends at once.
    """
    source = _source(model, config, settings or [])
    loaded = load_config(source)  # mistakes in it are reported before anything else
    check_is_importable(Path.cwd())
    address = _address()
    with contextlib.ExitStack() as holding:
        if address == OWN_CLUSTER:
            port = port or DEFAULT_PORT
            check_is_free(host, port, holding)
            check_can_start(loaded, source)
        else:
            check_is_known_there(access_variables(), address)
            check_answers(address)
            warn_of_relative_paths(loaded, _lines_of(source))
        warn_of_settings(loaded, _lines_of(source))
        status = _run(loaded, source, address, host, port, holding)
    raise typer.Exit(status)


def _source(model: str | None, config: Path | None, settings: Sequence[str]) -> Source:
    """Return what is served.

    Args:
        settings: of ``model``.

    Raises:
        ConfigError: two things are to be, or the settings are wrong or of no model.
    """
    if model is None:
        if settings:
            raise ConfigError(
                f"--set {settings[0]} is for MODEL: in a configuration, write it below the model's "
                "`name`"
            )
        return config or configured_path()
    if config is not None:
        raise ConfigError("give a model or --config, not both")
    chosen, name = parse_settings(settings), model
    if "model" in chosen:
        raise ConfigError("--set model=...: give the model as MODEL")
    if directory := directory_of(model):  # a relative one would begin elsewhere on a cluster
        model, name = directory, os.path.basename(directory)
    return {"models": [{"name": name, "model": model, **chosen}]}


def _run(
    loaded: ServeConfig,
    source: Source,
    address: str,
    host: str,
    port: int | None,
    holding: contextlib.ExitStack,
) -> int:
    """Serve ``loaded``, which ``source`` says; return the exit status.

    Args:
        port: ``None`` for that of a Ray Serve that runs already, if any.
        holding: keeps other servers from taking the ports.
    """
    place = {"host": host} if port is None else {"host": host, "port": port}
    deploy = {"http_options": place, "applications": [application_of(_arguments(source, host))]}
    with private_directory() as directory:
        path = directory / "serve.json"
        path.write_text(json.dumps(deploy), encoding="utf-8")
        limits = (str(loaded.drain_timeout_s), str(END_TIMEOUT_S))
        runner = [sys.executable, "-c", _RUNNER, str(path), address, *limits]
        environment = {**os.environ, "RAY_ADDRESS": address}
        removal_timeout_s = REMOVAL_TIMEOUT_S
        if address == OWN_CLUSTER:
            assert port is not None
            environment |= proxy_variables(host, port, directory, os.environ, holding)
            environment |= token_variables(directory, os.environ)
            environment |= directory_variables(os.environ)
            environment |= GRPC_VARIABLES
            removal_timeout_s = 0.0
        return run_until_signal(runner, loaded.drain_timeout_s, environment, removal_timeout_s)


def _arguments(source: Source, host: str) -> dict[str, Any]:
    """Return what the application is built with.

    Args:
        host: the address that clients use.
    """
    found: dict[str, Any] = {"is_local": True} if _is_loopback(host) else {}
    if source is not None:
        found["config"] = str(source.absolute()) if isinstance(source, Path) else source
    return found


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_is_importable(directory: Path) -> None:
    """Check that Ray's processes will find the application; otherwise they would start first, and
    then fail.

    Raises:
        ConfigError: something in ``directory`` is imported in place of our packages.
    """
    for found in shadows(directory):
        raise ConfigError(
            f"{found} hides the installed package from Ray: start in another directory"
        )


def check_is_known_there(variables: Sequence[str], address: str) -> None:
    """Check that nothing is configured by this environment only: the application is built by a
    process of the cluster, with the cluster's environment.

    Args:
        variables: of this environment, which say who may use the server.

    Raises:
        ConfigError: there are some: without them, others might use the server.
    """
    if variables:
        raise ConfigError(
            f"{', '.join(variables)} would not be known on the Ray cluster {address}: name the "
            "files of the keys in the configuration (access.api_keys_file, access.admin_key_file)"
        )


def check_answers(address: str) -> None:
    """Check that something listens there; Ray would try for minutes.

    Raises:
        ConfigError: nothing does.
    """
    if reason := why_unanswered(address):
        raise ConfigError(
            f"no Ray cluster answers at {address}, which RAY_ADDRESS names ({reason}): start it, "
            "or unset RAY_ADDRESS for one that starts with the server"
        )


def check_is_free(host: str, port: int, holding: contextlib.ExitStack) -> None:
    """Check that Ray Serve can listen there; otherwise everything else would be started first.

    Args:
        holding: until it is closed, another server that wants the same is refused.

    Raises:
        ConfigError: another program listens there, or is about to, or ``host`` is not an address of
            this machine.
    """
    if not host:
        raise ConfigError("--host is empty; 0.0.0.0 is every interface")
    if error := reservation_error(host, port, holding):
        reason = str(error.strerror)
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            reason += "; --port takes another one"
        raise ConfigError(f"cannot listen on {host}, port {port}: {reason}") from error


def check_can_start(config: ServeConfig, source: Source) -> None:
    """Check what would otherwise only be reported in a traceback of a started Ray process.

    Args:
        source: where ``config`` is from.

    Raises:
        ConfigError: a part of ``config`` is wrong on this machine.
    """
    check_tracing(config.telemetry)
    wrong, not_here = find_faults(config, _lines_of(source))
    if wrong or not_here:
        place = [f"{source}:"] if isinstance(source, Path) else []
        raise ConfigError("\n".join([*place, *not_here, *wrong]))


def _lines_of(source: Source) -> LineOf:
    return partial(yaml_line_of, read_text(source)) if isinstance(source, Path) else nowhere


def run_until_signal(
    command: list[str],
    drain_timeout_s: float,
    environment: Mapping[str, str] | None = None,
    removal_timeout_s: float = 0.0,
) -> int:
    """Run a command to its end; the first signal to end this process ends it in order, the second
    at once, but for the ``removal_timeout_s`` that it has to end what runs elsewhere.

    It has its own session, so that Ctrl-C reaches it once, and never only its children, and a
    standard input that ends when this process does, however that happens.  What still runs
    ``drain_timeout_s`` and ``END_TIMEOUT_S`` after the signal is killed.
    """
    signals: SimpleQueue[int] = SimpleQueue()

    def note(number: int, _frame: FrameType | None) -> None:
        signals.put(number)

    old = {number: signal.signal(number, note) for number in _ending_signals()}
    process = subprocess.Popen(
        command, env=environment, start_new_session=True, stdin=subprocess.PIPE
    )
    number = 0
    try:
        _wait(process, signals)
        if process.poll() is None:
            number = signals.get()
            process.send_signal(signal.SIGINT)
            ending = (
                f"ending: what is being answered may take {drain_timeout_s:g} s more; "
                "Ctrl-C again ends at once\n"
            )
            threading.Thread(target=_tell, args=(ending,), daemon=True).start()
            _wait(process, signals, drain_timeout_s + END_TIMEOUT_S)
            if not signals.empty():
                _hurry(process, removal_timeout_s)
    finally:
        kill_session(process.pid)
        status = process.wait()
        assert process.stdin is not None
        process.stdin.close()
        for each, handler in old.items():
            signal.signal(each, handler)
    return 128 + number if number else status


def _tell(text: str) -> None:
    """Write to standard error, which may be read no more, or be gone with its terminal."""
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), text.encode())


def _hurry(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Tell the process to end at once, until it has ended or the time is over."""
    deadline_s = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline_s:
        process.terminate()
        time.sleep(_POLL_S)


def _ending_signals() -> Iterator[signal.Signals]:
    """Yield the signals that end the server.  Closing a terminal sends SIGHUP, which nohup has set
    to be ignored."""
    yield from (signal.SIGTERM, signal.SIGINT)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        yield signal.SIGHUP


def _address() -> str:
    """Return the address of the Ray cluster to serve on.

    Ray would join, and deploy to, any cluster it finds on this machine, so it is told to start one
    unless the environment names another.
    """
    return os.environ.get("RAY_ADDRESS") or OWN_CLUSTER


def _wait(
    process: subprocess.Popen[bytes], signals: SimpleQueue[int], timeout_s: float = math.inf
) -> None:
    """Wait until the process has ended, a signal has arrived or the time is over."""
    deadline_s = time.monotonic() + timeout_s
    while process.poll() is None and signals.empty() and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
