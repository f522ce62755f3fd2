"""``hdserve serve`` as a user runs it: what it refuses, and how it ends; ``test_serve_cluster``
runs it with Ray."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from benchmarks.server import START_TIMEOUT_S
from deployments.application import AppArgs
from hdserve.cli import serve
from hdserve.cli.commands import app
from hdserve.cli.serve import check_is_free
from hdserve.errors import ConfigError
from tests.marked_processes import END_S, family, hdserve, started, wait_for, wait_until_gone
from tests.ports import free_port

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, lambda *_: print("told", flush=True))
subprocess.Popen(["sleep", "600"], process_group=0)
print("ready", flush=True)
while True:
    signal.pause()
"""

ORDERLY = """
import signal, time
def end(*_):
    time.sleep(0.4)
    print("what had begun has ended", flush=True)
    raise SystemExit(0)
signal.signal(signal.SIGINT, end)
print("ready", flush=True)
signal.pause()
"""


@pytest.fixture
def holding() -> Iterator[ExitStack]:
    """What keeps ports from others during a test."""
    with ExitStack() as found:
        yield found


def running(child: str, drain_timeout_s: float, on_hangup: str = "SIG_DFL") -> str:
    """A program that runs ``child`` as the command runs its server, whatever these tests were
    started by does with SIGHUP."""
    return (
        f"import signal; signal.signal(signal.SIGHUP, signal.{on_hangup});"
        "import sys; from hdserve.cli import serve; serve.END_TIMEOUT_S = 0.2;"
        f"sys.exit(serve.run_until_signal([sys.executable, '-c', {child!r}], {drain_timeout_s}))"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_has_begun_may_end(number: signal.Signals, tmp_path: Path) -> None:
    """For longer than Ray takes to end; one line says how long, and what ends it at once."""
    log = tmp_path / "log"
    with started(log, "-c", running(ORDERLY, 60)) as (process, mark):
        wait_for("ready", log, process)
        process.send_signal(number)
        assert process.wait(END_S) == 128 + number
        wait_until_gone(mark)
    ending = "ending: what is being answered may take 60 s more; Ctrl-C again ends at once"
    assert log.read_text().splitlines() == ["ready", ending, "what had begun has ended"]


def test_the_second_signal_ends_at_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with started(log, "-c", running(STUBBORN, 600)) as (process, mark):
        wait_for("ready", log, process)
        process.send_signal(signal.SIGINT)
        wait_for("told", log, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(END_S) == 128 + signal.SIGINT
        wait_until_gone(mark)


def test_what_does_not_end_is_killed(tmp_path: Path) -> None:
    """A child that ignores its signal, and its own one, of another group, end with the command."""
    log = tmp_path / "log"
    with started(log, "-c", running(STUBBORN, 0.2)) as (process, mark):
        wait_for("ready", log, process)
        assert len(family(mark)) > 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 128 + signal.SIGTERM
        wait_until_gone(mark)


def test_what_does_not_end_is_killed_where_nobody_reads(tmp_path: Path) -> None:
    """As in a terminal that was told to stand still: no room is left for what is said."""
    log = tmp_path / "log"
    still = (
        "import os, sys; _, full = os.pipe(); os.set_blocking(full, False); "
        "os.write(full, bytes(2**24)); os.set_blocking(full, True); sys.stderr = open(full, 'w'); "
    )
    with started(log, "-c", still + running(STUBBORN, 0.2)) as (process, mark):
        wait_for("ready", log, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 128 + signal.SIGTERM
        wait_until_gone(mark)


def test_it_outlives_its_terminal_where_it_is_told_to(tmp_path: Path) -> None:
    """As by nohup, which has SIGHUP ignored."""
    log = tmp_path / "log"
    with started(log, "-c", running(ORDERLY, 60, "SIG_IGN")) as (process, mark):
        wait_for("ready", log, process)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 128 + signal.SIGTERM
        wait_until_gone(mark)
    assert "what had begun has ended" in log.read_text()


def test_it_ends_in_order_where_nobody_reads(tmp_path: Path) -> None:
    """What it says goes nowhere once its terminal is closed."""
    log = tmp_path / "log"
    deaf = "import sys; sys.stderr = open('/dev/full', 'w'); "
    with started(log, "-c", deaf + running(ORDERLY, 60)) as (process, mark):
        wait_for("ready", log, process)
        process.send_signal(signal.SIGHUP)
        process.wait(END_S)
        wait_until_gone(mark)
    assert "what had begun has ended" in log.read_text()


def test_the_status_of_a_command_that_ends_by_itself(tmp_path: Path) -> None:
    with started(tmp_path / "log", "-c", running("raise SystemExit(7)", 60)) as (process, _):
        assert process.wait(START_TIMEOUT_S) == 7


def test_a_port_that_is_taken_is_told_before_anything_starts(holding: ExitStack) -> None:
    """Whoever starts a second server learns in a second what is wrong, with both names in it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"127\.0\.0\.1, port {port}: Address already in use; --port"
        ):
            check_is_free("127.0.0.1", port, holding)
    check_is_free("127.0.0.1", port, holding)
    check_is_free("0.0.0.0", port, holding)
    for host in ("192.0.2.77", "no.such.host.invalid"):  # no other port would do
        with pytest.raises(ConfigError, match=rf"{re.escape(host)}, port {port}: [\w ]+$"):
            check_is_free(host, port, holding)
    with pytest.raises(ConfigError, match="--host is empty"):  # to the system it is every interface
        check_is_free("", port, holding)


def test_a_machine_without_ipv6(holding: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its addresses are told as those of another machine are."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(ConfigError, match=r"on ::1, port 8000: Address family [\w ]+$"):
        check_is_free("::1", 8000, holding)


def test_a_port_at_which_another_server_is_about_to_listen(holding: ExitStack) -> None:
    """It is told as one that is taken, until that has ended, not when both have started Ray."""
    port = free_port()
    with ExitStack() as of_another:
        check_is_free("127.0.0.1", port, of_another)
        with pytest.raises(ConfigError, match=f"port {port}: Address already in use; --port"):
            check_is_free("127.0.0.1", port, holding)
    check_is_free("127.0.0.1", port, holding)


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"access": {"admin_key": "short"}}, "HDSERVE_ADMIN_KEY: a key needs at least 16"),
        ({"access": {"api_keys_file": "/nothing"}}, "cannot read the API keys in /nothing"),
        ({"models": [{"name": "m", "model": "./nothing"}]}, "there is no directory /"),
    ],
)
def test_what_would_not_start_is_told_before_anything_starts(
    section: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cluster of its own, whose files are those here; not by each of Ray's processes, in
    tracebacks."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"models": [{"name": "m", "model": "hdserve-tiny"}], **section}))
    told, *problems = refusal(monkeypatch, "local", "--config", str(path)).splitlines()
    assert told == f"{path}:"
    assert reason in "".join(problems)


def refusal(monkeypatch: pytest.MonkeyPatch, address: str, *arguments: str) -> str:
    """Why `hdserve serve` starts nothing on the Ray cluster at ``address``."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.delattr(serve, "run_until_signal")
    with pytest.raises(ConfigError) as refused:
        CliRunner().invoke(
            app, ["serve", "--port", str(free_port()), *arguments], catch_exceptions=False
        )
    return refused.value.message


def deployed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """The arguments of the application that the command would run on a cluster of its own."""
    found: list[Any] = []

    def read(command: list[str], *_: Any) -> int:
        (path,) = (word for word in command if word.endswith("serve.json"))
        found.append(json.loads(Path(path).read_text()))
        return 0

    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr(serve, "run_until_signal", read)
    command = ["serve", "--port", str(free_port()), *arguments]
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
    ((application,),) = (config["applications"] for config in found)
    return application["args"]


def test_its_processes_call_each_other_past_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the environment is for others, whichever variable of gRPC names it."""
    found: list[dict[str, str]] = []

    def read(_command: list[str], _drain_timeout_s: float, environment: Any, *_: Any) -> int:
        found.append(environment)
        return 0

    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(serve, "run_until_signal", read)
    command = ["serve", "--port", str(free_port())]
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
    assert [environment["grpc_proxy"] for environment in found] == [""]


def test_a_model_is_served_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under its own name; a directory under that of its last part, wherever Ray was started.  The
    file that the environment names is not served."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HDSERVE_CONFIG", str(tmp_path / "none.yaml"))
    (tmp_path / "own").mkdir()
    place = str(tmp_path / "own")
    for model, name, resolved in (
        ("hdserve-mini", "hdserve-mini", "hdserve-mini"),
        ("OWNER/MODEL", "OWNER/MODEL", "OWNER/MODEL"),
        ("./own", "own", place),
        ("own", "own", place),
        (place + "/", "own", place),
    ):
        wanted = {"models": [{"name": name, "model": resolved}]}
        assert deployed(monkeypatch, model)["config"] == wanted
    told = refusal(monkeypatch, "local", "hdserve-mini", "--config", "a.yaml")
    assert told == "give a model or --config, not both"


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.1", True), ("127.0.0.2", True), ("localhost", True), ("0.0.0.0", False)],
)
@pytest.mark.parametrize("arguments", [[], ["hdserve-mini"]])
def test_the_application_knows_whether_others_reach_it(
    host: str, is_local: bool, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = deployed(monkeypatch, *arguments, "--host", host)
    assert found.keys() == {*(["config"] if arguments else []), *(["is_local"] if is_local else [])}
    assert AppArgs.model_validate(found).is_local == is_local


def set_to(*settings: str) -> list[str]:
    """Options that set these."""
    return [word for setting in settings for word in ("--set", setting)]


def test_settings_of_a_model_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their keys in a configuration, in YAML; so they may be sections, too."""
    settings = set_to(
        "engine.max_num_sequences=32",
        "num_gpus=0.5",
        "reasoning_parser=auto",
        "statistics=null",
        "name=assistant",
        "aliases=[a, b=c]",
        "drafting={max_depth: 4}",
        "drafting.max_draft_tokens=8",
    )
    (model,) = deployed(monkeypatch, "hdserve-mini", *settings)["config"]["models"]
    assert model == {
        "name": "assistant",
        "model": "hdserve-mini",
        "engine": {"max_num_sequences": 32},
        "num_gpus": 0.5,
        "reasoning_parser": "auto",
        "statistics": None,
        "aliases": ["a", "b=c"],
        "drafting": {"max_depth": 4, "max_draft_tokens": 8},
    }


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["num_gpu=1"], "models.0.num_gpu: unknown key; did you mean 'num_gpus'?"),
        (["engine.max_num_seqs=1"], "models.0.engine.max_num_seqs: unknown key; did you mean"),
        (["engine.dtype=int3"], "models.0.engine.dtype: auto, "),
        (["num_gpus"], "--set num_gpus: KEY=VALUE is expected, as in num_gpus=0.5"),
        (["engine.=1"], "--set engine.=1: KEY=VALUE is expected"),
        (["=1"], "--set =1: KEY=VALUE is expected"),
        (["aliases=[a"], "--set aliases=[a: line 1, "),
        (["num_gpus=1", "num_gpus=0"], "--set num_gpus=0: num_gpus has a value already"),
        (["engine=1", "engine.dtype=auto"], "--set engine.dtype=auto: engine has a value already"),
        (["model=hdserve-tiny"], "--set model=...: give the model as MODEL"),
        (
            ["defaults.chat_template_kwargs.date_string=2026-07-26"],
            "--set defaults.chat_template_kwargs.date_string=2026-07-26: a date needs quotes",
        ),
    ],
)
def test_settings_that_are_wrong(
    settings: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal(monkeypatch, "local", "hdserve-mini", *set_to(*settings)).startswith(reason)


@pytest.mark.parametrize("others", [[], ["--config", "a.yaml"]])
def test_settings_of_a_configuration_are_in_its_file(
    others: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several models, nothing says which is meant."""
    told = refusal(monkeypatch, "local", *others, *set_to("num_gpus=1"))
    assert told.startswith("--set num_gpus=1 is for MODEL: in a configuration, write it below ")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("hdserve-none", "no bundled model is called hdserve-none"),
        ("./none", "models.0.model: there is no directory /"),
    ],
)
def test_a_model_that_is_not_there_is_told(
    model: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reason in refusal(monkeypatch, "local", model)


def test_the_file_of_the_environment_is_named_in_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the line, as the one of --config is."""
    path = tmp_path / "config.yaml"
    path.write_text("models:\n- name: m\n  model: ./nothing\n")
    monkeypatch.setenv("HDSERVE_CONFIG", str(path))
    told, problem = refusal(monkeypatch, "local").splitlines()
    assert told == f"{path}:"
    assert problem.startswith("line 3, models.0.model: there is no directory")


def test_what_would_not_start_is_the_status_of_the_command(tmp_path: Path) -> None:
    """And its last words, without a traceback."""
    log = tmp_path / "log"
    program = hdserve("serve", "--config", str(tmp_path / "nothing.yaml"))
    with started(log, "-c", program, RAY_ADDRESS="local") as (process, _):
        assert process.wait(START_TIMEOUT_S) == 2
    assert log.read_text().startswith("hdserve: cannot read the configuration")


@pytest.mark.parametrize(
    "name", ["HDSERVE_API_KEYS_FILE", "HDSERVE_ADMIN_KEY_FILE", "HDSERVE_ADMIN_KEY"]
)
def test_keys_that_a_cluster_would_not_know_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would serve everybody: its processes have an environment of their own."""
    (tmp_path / "keys").write_text("a-key-of-sixteen-characters tenant\n")
    monkeypatch.setenv(name, "k" * 20 if name.endswith("KEY") else str(tmp_path / "keys"))
    told = refusal(monkeypatch, "127.0.0.1:1")
    assert f"{name} would not be known on the Ray cluster 127.0.0.1:1" in told


@pytest.mark.parametrize("is_own", [True, False])
def test_relative_paths_that_a_cluster_would_open_elsewhere_are_told(
    is_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a line each; a cluster of its own is started here, and opens what is here."""
    path = tmp_path / "config.yaml"
    path.write_text(
        "models:\n- {name: m, model: hdserve-tiny, statistics: counted}\n"
        "model_database: {snapshot_dir: kept}\n"
    )
    monkeypatch.setattr(serve, "run_until_signal", lambda *_: 0)
    arguments = ["serve", "--config", str(path), "--port", str(free_port())]
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        address = f"127.0.0.1:{cluster.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", "local" if is_own else address)
        told = CliRunner().invoke(app, arguments, catch_exceptions=False)
    begins = "is relative: it begins in the directory of `ray start`, not of this command"
    wanted = [
        f"warning: line 3, model_database.snapshot_dir: kept {begins}",
        f"warning: line 2, models.0.statistics: counted {begins}",
    ]
    assert told.exit_code == 0
    assert told.stderr.splitlines() == ([] if is_own else wanted)


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        ([], None),
        (["hdserve-tiny"], None),
        (["hdserve-tiny", "--set", "num_replicas=4"], "gateway.max_ongoing_requests"),
    ],
)
def test_settings_that_are_probably_mistakes_are_told(
    arguments: list[str], place: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once each; there are none in what is served by default."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr(serve, "run_until_signal", lambda *_: 0)
    command = ["serve", "--port", str(free_port()), *arguments]
    told = CliRunner().invoke(app, command, catch_exceptions=False)
    assert told.exit_code == 0
    lines = told.stderr.splitlines()
    assert [line.partition(": all gateways")[0] for line in lines] == (
        [] if place is None else [f"warning: {place}"]
    )
