"""``hdserve doctor`` finds nothing here, and finds what is broken on purpose."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray._private.utils import get_num_cpus
from ray.serve._private.constants import (
    DRAINING_MESSAGE,
    HEALTHY_MESSAGE,
    NO_REPLICAS_MESSAGE,
    NO_ROUTES_MESSAGE,
)
from ray.serve._private.haproxy_templates import HAPROXY_HEALTHZ_RULES_TEMPLATE
from typer.testing import CliRunner

from deployments.http.documented_api import DocumentedApi
from hdserve.cli.commands import app
from hdserve.config import default_config, parse_config
from hdserve.config.deployed import DeployedConfig, as_it_is
from hdserve.doctor import machine
from hdserve.doctor.cluster import Cluster, read_cluster
from hdserve.doctor.configuration import (
    check_access,
    check_gpus,
    check_memory,
    check_model_database,
    check_paths,
    check_placement,
    check_settings,
    check_telemetry,
)
from hdserve.doctor.diagnosis import as_placed, diagnose
from hdserve.doctor.finding import Finding, Verdict
from hdserve.doctor.machine import check_cluster, check_packages, check_port, check_ray
from hdserve.doctor.model import check_model
from hdserve.engine.hardware import description
from tests.closed import closed as closed_directory
from tests.closed import open_directory
from tests.doctor.findings import can_be_pasted, verdicts
from tests.ports import free_port


@pytest.mark.parametrize(
    ("remedy", "can"),
    [
        ("engine: {device: auto}  # or another machine", True),
        ("ray start --head  # or elsewhere", True),
        ("engine.device: auto", False),
        ("fewer models or num_replicas", False),
    ],
)
def test_what_can_be_pasted(remedy: str, can: bool) -> None:
    assert can_be_pasted(remedy) is can


MODELS = [{"name": "m", "model": "hdserve-mini"}]

API = DocumentedApi(needs_key=False, title="hdserve", version="1", description="LLM.").openapi()


def test_the_command_on_this_machine(tmp_path: Path) -> None:
    """All is well: every check runs, and none fails."""
    config = tmp_path / "config.yaml"
    snapshots = str(tmp_path / "not" / "yet")
    config.write_text(json.dumps({"models": MODELS, "model_database": {"snapshot_dir": snapshots}}))
    arguments = ["doctor", "--config", str(config), "--port", str(free_port())]
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    findings = json.loads(result.stdout)
    subjects = {finding["subject"] for finding in findings}
    assert subjects >= {"Python", "packages", "Ray", "port", "access", "model database"}
    assert subjects >= {"m: device", "m: model", "m: statistics"}
    failures = [finding for finding in findings if finding["verdict"] == "failure"]
    assert failures == []
    assert result.exit_code == 0


def test_who_can_read_the_keys(tmp_path: Path) -> None:
    """A file that cannot be used keeps it from serving; one that is open to everybody does not."""
    keys = tmp_path / "keys"

    def found() -> list[str]:
        config = parse_config({"models": MODELS, "access": {"api_keys_file": str(keys)}})
        return verdicts(check_access(config))

    assert found() == ["failure"]
    keys.write_text("a-key-of-sixteen-characters\n")
    keys.chmod(0o600)
    assert found() == ["ok"]
    keys.chmod(0o644)
    assert found() == ["warning"]
    assert verdicts(check_access(parse_config({"models": MODELS}))) == ["ok"]


@pytest.mark.parametrize("content", [None, "short\n", "# none\n"])
def test_what_mends_a_file_of_keys(tmp_path: Path, content: str | None) -> None:
    """One that is missing is made by the remedy, as it stands; one that is there is not lost."""
    keys = tmp_path / "all keys"
    if content is not None:
        keys.write_text(content)
    config = parse_config({"models": MODELS, "access": {"api_keys_file": str(keys)}})
    (finding,) = check_access(config)
    if content is None:
        subprocess.run(["bash", "-c", finding.remedy], check=True)
        assert verdicts(check_access(config)) == ["ok"]
    else:
        assert finding.remedy == f"nano '{keys}'"


def test_what_mends_an_administrators_key(tmp_path: Path) -> None:
    """One that is not there, one that is too short, and one in the configuration itself."""
    admin = tmp_path / "admin"
    config = parse_config({"models": MODELS, "access": {"admin_key_file": str(admin)}})
    (finding,) = check_access(config)
    assert (finding.verdict, "openssl" in finding.remedy) == ("warning", True)
    admin.write_text("short\n")
    admin.chmod(0o600)
    (finding,) = check_access(config)
    assert finding.verdict == "failure"
    subprocess.run(["bash", "-c", finding.remedy], check=True)
    assert verdicts(check_access(config)) == ["ok"]
    inline = parse_config({"models": MODELS, "access": {"admin_key": "short"}})
    assert verdicts(check_access(inline)) == ["failure"]


def test_a_failure_is_shown_with_its_remedy(tmp_path: Path) -> None:
    """And is the exit status; whatever keeps `hdserve serve` from starting is one."""
    config = tmp_path / "config.yaml"
    models = [
        {"name": "m", "model": str(tmp_path / "none")},
        {"name": "n", "model": "hdserve-tiny", "engine": {"max_model_len": 4096}},
    ]
    config.write_text(json.dumps({"models": models}))
    result = CliRunner().invoke(app, ["doctor", "--config", str(config)])
    assert result.exit_code == 1
    assert "failure  m: model" in result.stdout
    command = f"hf download OWNER/MODEL --local-dir {tmp_path / 'none'}"
    assert f"mend it with: {command}" in result.stdout
    assert "n: engine.max_model_len: the model takes 2048 tokens at most, not 4096" in result.stdout


def test_packages() -> None:
    """What is not installed, or not fit, is named."""
    assert verdicts(check_packages()) == ["ok"]
    assert verdicts(check_packages("no-such-distribution")) == ["failure"]


def test_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little shared memory is a warning, a Ray that cannot be imported a failure."""
    assert verdicts(check_ray(tmp_path, min_free_bytes=2**62)) == ["ok", "warning"]
    (tmp_path / "ray.py").write_text("raise ImportError('broken on purpose')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (finding,) = check_ray(tmp_path)
    assert finding.verdict is Verdict.FAILURE
    assert "broken on purpose" in finding.text


def test_cluster() -> None:
    """Of an address that is one somebody has to listen."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        (finding,) = check_cluster(address)
        assert (finding.verdict, "RAY_ADDRESS" in finding.remedy) == ("failure", True)
        listener.listen()
        for found in (address, f"ray://{address}"):
            assert verdicts(check_cluster(found)) == ["ok"]
    for found in ("", "local", "auto"):
        assert verdicts(check_cluster(found)) == []


def test_placement() -> None:
    """Of this machine where the cluster is its own; of none that does not answer."""
    needy = parse_config({"models": [{**MODELS[0], "num_cpus": 1e6}]})
    for address in ("", "local"):
        here = read_cluster(address)
        assert verdicts(check_placement(default_config(), here, address)) == ["ok"]
        assert verdicts(check_placement(needy, here, address)) == ["failure"]
    nobody = f"127.0.0.1:{free_port()}"
    assert read_cluster(nobody) is None
    assert verdicts(check_placement(needy, None, nobody)) == []
    assert verdicts(check_placement(needy, None, "auto")) == ["warning"]
    assert verdicts(check_placement(needy, None, "")) == []


def test_cores_are_those_that_ray_counts() -> None:
    """All of the machine or container, as when it starts, although this process may use one."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        here = read_cluster("")
    finally:
        os.sched_setaffinity(0, allowed)
    assert here is not None
    assert [node["CPU"] for node in here.nodes] == [get_num_cpus()]


def test_gpus_that_are_too_few_for_all() -> None:
    """Where a cluster says what it has."""
    config = parse_config({"models": [MODELS[0], {**MODELS[0], "name": "n"}]})
    for number, wanted in ((0, []), (1, ["warning"]), (2, [])):
        nodes = [{"GPU": number}]
        assert verdicts(check_gpus(config, Cluster(nodes, nodes))) == wanted
    assert verdicts(check_gpus(config, None)) == []


def test_paths_of_a_cluster_that_runs_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They begin where Ray was started there; absolute ones are what mends it."""
    directory = tmp_path / "a: b"
    directory.mkdir()
    monkeypatch.chdir(directory)
    models = [{**MODELS[0], "chat_template": "chat.jinja"}]
    database = {"snapshot_dir": "kept"}
    config = parse_config({"models": models, "model_database": database, "statistics_root": "all"})
    for address in ("", "local"):
        assert verdicts(check_paths(config, address)) == []
    findings = list(check_paths(config, "127.0.0.1:6379"))
    assert verdicts(findings) == ["warning"] * 3
    assert "chat.jinja is relative: it begins in the directory of `ray start`" in findings[0].text
    assert {found.subject: yaml.safe_load(found.remedy) for found in findings} == {
        "m: paths": {"chat_template": f"{directory}/chat.jinja"},
        "model_database: paths": {"model_database": {"snapshot_dir": f"{directory}/kept"}},
        "paths": {"statistics_root": f"{directory}/all"},
    }


def test_memory_of_all_replicas() -> None:
    """Each has its own weights."""
    many = {"num_replicas": 10**9, "num_cpus": 0, "engine": {"device": "cpu"}}
    config = parse_config({"models": [{**MODELS[0], **many}]})
    assert verdicts(check_memory(config)) == ["failure"]
    assert verdicts(check_memory(default_config())) == []


def test_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces need packages that are not always there."""
    assert verdicts(check_telemetry(default_config())) == []
    telemetry = {"endpoint": "http://localhost:4318/v1/traces"}
    config = parse_config({"models": [{"name": "a", "model": "a"}], "telemetry": telemetry})
    module = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, module, None)
    (finding,) = check_telemetry(config)
    assert finding.verdict == "failure"
    assert "hdserve[tracing]" in finding.remedy


def test_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A free one is fine; one at which a stranger listens, who is silent, is not."""
    monkeypatch.setattr(machine, "_HTTP_TIMEOUT_S", 0.1)
    port = free_port()
    assert verdicts(check_port(port)) == ["ok"]
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
        assert verdicts(check_port(port)) == ["failure"]


class Answering:
    """A server that sends the same bytes whatever it is asked."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._answer_all)
        self._thread.start()

    def _answer_all(self) -> None:
        with contextlib.suppress(OSError):  # no longer listening
            while True:
                connection, _ = self._listener.accept()
                with connection:
                    connection.recv(1000)
                    connection.sendall(self._answer)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (b"220 mail.example ESMTP\r\n", "failure"),
        (b'HTTP/1.0 200 OK\r\n\r\n{"version":"0.33.0"}', "failure"),
        (b'HTTP/1.0 200 OK\r\n\r\n{"openapi":"3.1.0","info":{"title":"FastAPI"}}', "failure"),
        (b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(API, separators=(",", ":")).encode(), "ok"),
    ],
)
def test_who_listens(answer: bytes, verdict: str) -> None:
    """hdserve is told from other servers, and from what does not speak HTTP."""
    with contextlib.closing(Answering(answer)) as server:
        assert verdicts(check_port(server.port)) == [verdict]


def test_who_listens_here_is_asked_past_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the environment is for others; it may not even reach this machine."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    answer = b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(API, separators=(",", ":")).encode()
    with contextlib.closing(Answering(answer)) as server:
        assert verdicts(check_port(server.port)) == ["ok"]


@pytest.mark.parametrize(
    ("status", "answer", "is_proxy"),
    [
        (200, HEALTHY_MESSAGE, True),
        (503, NO_REPLICAS_MESSAGE, True),
        (503, "Service Unavailable", True),
        (200, "<html>success</html>", False),
        (404, "Not Found", False),
    ],
)
def test_a_proxy_without_an_application(status: int, answer: str, is_proxy: bool) -> None:
    """Ray Serve's own, which listens while no gateway does, is no other program: another port
    would not help."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_health = self.path == "/-/healthz"
            self.send_response(status if is_health else 404)
            self.end_headers()
            self.wfile.write((answer if is_health else f"Path '{self.path}' not found.").encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        (finding,) = check_port(server.server_port)
        server.shutdown()
        thread.join()
    assert verdicts([finding]) == ["failure"]
    assert ("Ray Serve's proxy listens" in finding.text) == is_proxy
    assert finding.remedy.startswith("serve status" if is_proxy else "hdserve serve --port")


def test_the_answers_of_a_proxy_are_those_of_ray() -> None:
    ours = {HEALTHY_MESSAGE, NO_ROUTES_MESSAGE, NO_REPLICAS_MESSAGE, DRAINING_MESSAGE}
    assert ours <= machine.PROXY_ANSWERS
    (other,) = machine.PROXY_ANSWERS - ours
    assert f'status 503 content-type text/plain string "{other}"' in HAPROXY_HEALTHZ_RULES_TEMPLATE


def test_a_port_that_is_for_root(tmp_path: Path) -> None:
    """Nobody listens there; none may."""
    code = (
        "from hdserve.doctor.machine import check_port; (found,) = check_port(80); "
        "print(found.text, found.remedy, sep=chr(10))"
    )
    apart = ["unshare", "--user", "--net"]  # whose root this process is not
    command = [*apart, sys.executable, "-c", code]
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("there are no namespaces here")
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    text, remedy = found.stdout.splitlines()
    assert text == "nobody but root may listen on 80"
    assert remedy == "hdserve serve --port 1024"


def test_another_port_is_one_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not just the next one, which may be taken or none."""
    monkeypatch.setattr(machine, "_HTTP_TIMEOUT_S", 0.1)
    with socket.socket() as last:
        last.bind(("127.0.0.1", 65535))
        last.listen()
        (finding,) = check_port(65535)
    port = int(finding.remedy.rpartition(" ")[2])
    assert verdicts(check_port(port)) == ["ok"]


def test_model_database(tmp_path: Path) -> None:
    """Off, in memory and of another version are warnings; a place that is no directory is a
    failure."""

    def check(**options: Any) -> list[str]:
        models = [{"name": "m", "model": "hdserve-mini"}]
        config = parse_config({"models": models, "model_database": options})
        return verdicts(check_model_database(config))

    assert check(is_enabled=False) == ["warning"]
    assert check() == ["warning"]
    assert check(snapshot_dir=tmp_path / "new") == ["ok"]
    (tmp_path / "old" / "v0" / "a-database").mkdir(parents=True)
    (tmp_path / "old" / "v0" / "a-database" / "generation").touch()
    assert check(snapshot_dir=tmp_path / "old") == ["ok", "warning"]
    (tmp_path / "old" / "v0").rename(tmp_path / "old" / "v1")
    assert check(snapshot_dir=tmp_path / "old") == ["ok"]
    (tmp_path / "file").touch()
    assert check(snapshot_dir=tmp_path / "file") == ["failure"]
    assert check(snapshot_dir="/proc/nothing") == ["failure"]


def test_a_directory_that_cannot_be_written() -> None:
    """Though all may look into it."""
    with open_directory() as place:
        models = [{"name": "m", "model": "hdserve-mini"}]
        database = {"snapshot_dir": place / "new"}
        config = parse_config({"models": models, "model_database": database})
        with closed_directory(place, 0o555):
            (found,) = check_model_database(config)
    assert (found.verdict, found.text) == (Verdict.FAILURE, f"{place} cannot be written")
    assert found.remedy.startswith("sudo install -d ")


def test_what_may_not_be_looked_at(tmp_path: Path) -> None:
    """Whatever is configured below it, what opens the directory is said."""
    inside = tmp_path / "inside"
    model = {**MODELS[0], "statistics": str(inside / "s")}
    database, keys = {"snapshot_dir": inside / "db"}, {"api_keys_file": str(inside / "keys")}
    config = parse_config({"models": [model], "model_database": database, "access": keys})
    with closed_directory(tmp_path):
        found = [
            *check_access(config),
            *check_model_database(config),
            *check_model(config.models[0]),
        ]
    faults = [finding for finding in found if finding.verdict is not Verdict.OK]
    assert all(item.remedy.startswith("sudo chmod a+rX /") for item in faults)
    assert verdicts(faults) == ["failure", "failure", "warning"]


@pytest.mark.parametrize(
    ("closed", "remedy"),
    [
        ("lost+found", ""),
        ("v1", 'chown -R "$USER" {}/v1'),
        ("v1/a-model", 'chown -R "$USER" {}/v1'),
        ("v1/a-model/a-namespace", 'chown -R "$USER" {}/v1'),
        ("", 'chown "$USER" {}'),
    ],
)
def test_only_what_is_its_own_has_to_be_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str, remedy: str
) -> None:
    """Others may have directories there: nobody is told to take them over."""
    for name in ("lost+found", "v1/a-model/a-namespace"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path / closed)
    models = [{"name": "m", "model": "hdserve-mini"}]
    config = parse_config({"models": models, "model_database": {"snapshot_dir": tmp_path}})
    (found,) = check_model_database(config)
    assert found.remedy == (remedy and f"sudo {remedy.format(tmp_path)}")


def test_a_disk_that_is_mounted_read_only(tmp_path: Path) -> None:
    """No owner mends it, whether it has the directory or is what the directory has of databases."""
    disks, wanted = (tmp_path / "a", tmp_path / "b/v1"), (tmp_path / "a/new", tmp_path / "b")
    for disk in disks:
        disk.mkdir(parents=True)
    apart = ["unshare", "--map-root-user", "--mount"]
    both = 'for disk in "$0" "$1"; do mount -t tmpfs -o ro none "$disk" || exit; done; shift; "$@"'
    mount = ["sh", "-c", both, *map(str, disks)]
    if subprocess.run([*apart, *mount, "true"], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    code = (
        "import sys; from hdserve.config import parse_config; "
        "from hdserve.doctor.configuration import check_model_database as check; "
        "models = [{'name': 'm', 'model': 'hdserve-mini'}]; "
        "configs = [parse_config({'models': models, 'model_database': {'snapshot_dir': path}}) "
        "for path in sys.argv[1:]]; "
        "[print(found.text, found.remedy, sep=chr(10)) for config in configs "
        "for found in check(config)]"
    )
    command = [*apart, *mount, sys.executable, "-c", code, *map(str, wanted)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    told = [
        (
            f"{disk} cannot be written",
            f"sudo mount -o remount,rw {disk}  # or another snapshot_dir",
        )
        for disk in disks
    ]
    assert found.stdout.splitlines() == [line for lines in told for line in lines]
    assert all(can_be_pasted(remedy) for _, remedy in told)


def test_memory_that_the_application_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it serves nothing is said of what is left."""
    monkeypatch.setattr(description, "free_bytes", lambda _device, _share: 0.0)
    config = parse_config({"models": [{**MODELS[0], "engine": {"device": "cpu"}}]})

    def failures(port: int) -> set[str]:
        found = diagnose(as_it_is(config), port, "")
        return {each.subject for each in found if each.verdict is Verdict.FAILURE}

    assert failures(free_port()) == {"memory", "m: memory"}
    answer = b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(API, separators=(",", ":")).encode()
    with contextlib.closing(Answering(answer)) as server:
        assert failures(server.port) == set()


@pytest.mark.parametrize(("built", "beside", "num_gpus"), [(1, 6, 1), (6, 1, 0)])
def test_gpus_are_those_of_the_arguments(built: int, beside: int, num_gpus: float) -> None:
    """What is next to them changes how many replicas there are, not what each reserves."""
    config, other = (
        parse_config({"models": [{**MODELS[0], "num_replicas": number}]})
        for number in (beside, built)
    )
    nodes = [{"CPU": 8.0, "GPU": 4.0}]
    (model,) = as_placed(DeployedConfig(config, other), Cluster(nodes, nodes)).models
    assert (model.num_gpus, model.max_num_replicas) == (num_gpus, beside)


def test_settings(tmp_path: Path) -> None:
    """A drafter, a context, a template or a policy that a server would not start with is a
    failure."""

    def found(**model: Any) -> list[Finding]:
        return list(check_settings(parse_config({"models": [{**MODELS[0], **model}]})))

    assert found(engine={"max_model_len": 64}) == []
    (finding,) = found(engine={"max_model_len": 4096})
    assert (finding.subject, finding.verdict) == ("m: engine.max_model_len", "failure")
    assert finding.remedy == "engine: {max_model_len: 2048}"
    for drafter in ({"name": "hierarhcy"}, {"name": "prompt-lookup", "options": {"x": 1}}):
        assert verdicts(found(drafting={"drafters": [drafter]})) == ["failure"]
    for policy, wanted in (("json:dumps", []), ("no.such:policy", ["failure"])):
        autoscaling = {"policy": {"policy_function": policy}}
        assert verdicts(found(autoscaling=autoscaling)) == wanted
    path = tmp_path / "own.jinja"
    for text, wanted in (("{{ messages }}", []), ("{{ messages", ["failure"])):
        path.write_text(text)
        assert verdicts(found(chat_template=str(path))) == wanted
    for name, wanted in (("enable_thinking", []), ("chat_template", ["failure"])):
        assert verdicts(found(defaults={"chat_template_kwargs": {name: "a"}})) == wanted


def test_settings_that_are_probably_mistakes() -> None:
    """What ``check-config`` warns of, each with what fixes it; and with that nothing is left."""
    narrow = {"num_replicas": 2, "max_ongoing_requests": 10}
    first = {"name": "m", "model": "hdserve-mini", "draft_from": ["n", "o"]}
    silent = {"name": "n", "model": "hdserve-mini", "share_output": False}
    gpu = {"name": "o", "model": "hdserve-mini", "num_gpus": 0, "engine": {"device": "cuda"}}
    config = {"models": [first, silent, gpu], "gateway": narrow}
    findings = list(check_settings(parse_config(config)))
    assert verdicts(findings) == ["warning"] * 3
    assert [found.subject for found in findings] == [
        "gateway.max_ongoing_requests",
        "m: draft_from",
        "o: engine.device",
    ]
    whole, *of_models = (yaml.safe_load(found.remedy.partition("  # ")[0]) for found in findings)
    assert whole["gateway"].keys() == {"max_ongoing_requests"}
    assert of_models == [{"draft_from": ["o"]}, {"num_gpus": 1}]
    models = [first | of_models[0], silent, gpu | of_models[1]]
    mended = {"models": models, "gateway": narrow | whole["gateway"]}
    assert list(check_settings(parse_config(mended))) == []
    (finding,) = check_settings(parse_config({**mended, "model_database": {"is_enabled": False}}))
    assert (finding.subject, finding.verdict) == ("m: draft_from", "warning")
    assert finding.remedy == "draft_from: []  # or model_database: {is_enabled: true}"
