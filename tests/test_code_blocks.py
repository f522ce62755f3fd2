"""Every code block of README and docs: it is of a kind that is checked, and holds.

Here programs parse the commands that are shown, files they name exist, and what is written as YAML,
JSON or TOML is that.  ``RUN`` says which commands are run to their end, ``NOT_RUN`` why others are
not.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from ray.serve.schema import ServeDeploySchema
from typer.main import get_command

from deployments.gateway import Gateway
from deployments.http.routes import build_api
from deployments.openai.protocol import ChatBody
from hdserve.cli.commands import app as hdserve_app
from hdserve.config import default_config, parse_config
from hdserve.config.deployed import read_deployed_config
from hdserve.prompts import read_prompts
from tests.documents import PAGES, ROOT, blocks, commands, shell_commands
from tests.k8s.http_route import check_http_route
from tests.k8s.manifests import (
    K8S,
    TARGETS,
    check_built_in,
    check_pod_templates,
    groups,
    of_kind,
    ray_service,
    render,
    serve_config,
    unknown_keys,
)

RUN = {
    "curl": "deployments/test_documented_requests and deployments/test_api_end_to_end",
    "hdserve": "test_documented_commands, test_serve_cluster and deployments/test_bench_serve",
    "kubectl kustomize": "test_kubectl_asks_for_a_cluster",
}
"""Where, by how they begin."""

NOT_RUN = {
    "make": "installs, serves, or takes minutes to hours: its rules are printed here",
    "pytest": "would run the tests in the tests: what it names is collected here",
    "python benchmarks/": "takes minutes to hours: its parser reads the options here",
    "python -m": "takes minutes to hours: its parser reads the options here",
    "kubectl create -k github.com": "comes from the network",
    "kubectl delete -k github.com": "comes from the network, too",
    "kubectl": "there is no cluster: here each is run until it asks for one",
    "docker build": "needs Docker: k8s/test_dockerfile reads what it builds from",
    "docker pull": "needs Docker",
    "docker save": "needs Docker",
    "kind load": "needs a cluster in Docker",
    "minikube image load": "needs a cluster",
    "sudo k3s ctr images import": "needs a cluster",
    "ray": "would start a cluster of many machines",
    "export": "is the shell's own",
    "(umask": "is the shell's own",
    ". .venv/bin/activate": "is Python's own",
    "vllm bench serve": "is vLLM's: deployments/test_vllm_bench runs it where it is installed",
    "claude": "is a client's, and was run by hand in the version that docs/clients.md names",
    "codex": "as above",
    "qwen": "as above",
    "aider": "as above",
    "lm_eval": "as above",
    "echo": "is the system's",
    "base64": "is the system's",
    "tr": "is the system's",
    "openssl": "is the system's",
}
"""Why, by how they begin."""

PYTHON_RUN_ELSEWHERE = {
    "README.md": 2,
    "docs/adding-a-draft-source.md": 2,
    "docs/http.md": 1,
    "docs/offline.md": 5,
    "docs/quickstart.md": 3,
}

EXAMPLES_RUN = {
    "offline.py": "test_docs.py",
    "stream_client.py": "deployments/test_documented_requests.py",
}
"""Where, the programs in ``examples``."""

BLOCKS = [
    pytest.param(path, language, text, id=f"{path.relative_to(ROOT)}-{number}-{language}")
    for path in PAGES
    for number, (language, text) in enumerate(blocks(path))
]


@pytest.mark.parametrize(("path", "language", "text"), BLOCKS)
def test_block(path: Path, language: str, text: str, tmp_path: Path) -> None:
    if language == "python":
        compile(text, str(path), "exec")
    elif language == "json":
        assert json.loads(text)
    elif language == "jsonl":
        path = tmp_path / "prompts.jsonl"
        path.write_text(text)
        assert read_prompts(path)
    elif language == "toml":
        assert tomllib.loads(text)
    elif language == "yaml":
        check_yaml(yaml.safe_load(text), tmp_path)
    elif language == "sh":
        for words in commands(text):
            check_command(words)
    else:
        assert language == "text", "name its language, so that it is checked"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_programs_are_run(path: Path) -> None:
    """A new Python block needs a test that runs it; then it is counted here."""
    name = str(path.relative_to(ROOT))
    num = sum(language == "python" for language, _ in blocks(path))
    assert num == PYTHON_RUN_ELSEWHERE.get(name, 0)


def test_examples_are_run() -> None:
    """A new program needs a test that runs it; then it is named here."""
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == EXAMPLES_RUN.keys()
    for name, test in EXAMPLES_RUN.items():
        assert f'"examples" / "{name}"' in (ROOT / "tests" / test).read_text(encoding="utf-8")


def test_what_is_not_run_says_why() -> None:
    """Each command is run by a test or one of those that are listed, and no more are listed."""
    shown = [" ".join(words) for words in shell_commands()]
    found = {_beginning(line) for line in shown if not line.startswith(tuple(RUN))}
    assert found == NOT_RUN.keys()


def _beginning(line: str) -> str:
    """The longest in the table that ``line`` begins with; the line itself where there is none."""
    return max(filter(line.startswith, NOT_RUN), key=len, default=line)


def check_yaml(data: Any, directory: Path) -> None:
    """A whole configuration, sections of one, a part of a kustomization or of a Serve config file,
    operations of a patch of the RayService, or a manifest."""
    if isinstance(data, list):
        patch = {"target": {"kind": "RayService"}, "patch": yaml.safe_dump(data)}
        data = {"patches": [patch]}
    if data.keys() & {"images", "labels", "patches"}:
        check_kustomization(data, directory)
        return
    if "deployments" in data:
        check_deployments(data, directory)
        return
    if data.get("kind") == "HTTPRoute":
        check_http_route(data)
        return
    if "kind" in data:
        check_built_in([data])
        return
    names = {"hierarchy"}
    for model in data.get("models", ()):
        names |= {item["name"] for item in model.get("drafting", {}).get("drafters", ())}
    assert names <= {"hierarchy", "phrase"}
    parse_config({"models": [{"name": "a", "model": "hdserve-tiny"}], **data})


def check_kustomization(part: dict[str, Any], directory: Path) -> None:
    """Each of its patches and images changes the overlay, to something that is valid; with its
    labels each object that the Prometheus operator reads has them."""
    plain = render("overlays/gpu")
    for key in ("images", "patches"):
        for item in part.get(key, ()):
            changed = rendered_with({key: [item]}, directory)
            assert changed != plain, item
            check_built_in(changed)
            (service,) = of_kind(changed, "RayService")
            check_pod_templates(service)
            check_added_containers(service, of_kind(plain, "RayService")[0])
    if "labels" not in part:
        return
    read = [
        manifest
        for manifest in rendered_with(part, directory)
        if manifest["apiVersion"].startswith("monitoring.coreos.com/")
    ]
    assert len(read) == 3
    for manifest in read:
        for item in part["labels"]:
            assert item["pairs"].items() <= manifest["metadata"]["labels"].items()


def check_added_containers(service: dict[str, Any], plain: dict[str, Any]) -> None:
    """What runs beside Ray is a sidecar: pods of Ray never restart another container, and one that
    has ended would keep its pod from being ready."""
    for group, before in zip(groups(service), groups(plain), strict=True):
        pod = group["template"]["spec"]
        assert len(pod["containers"]) == 1
        known = {item["name"] for item in before["template"]["spec"].get("initContainers", ())}
        for container in pod.get("initContainers", ()):
            if container["name"] not in known:
                assert container["restartPolicy"] == "Always"


def rendered_with(part: dict[str, Any], directory: Path) -> tuple[dict[str, Any], ...]:
    """The overlay of GPUs with a part of a kustomization on it."""
    place = Path(tempfile.mkdtemp(dir=directory))
    overlay = os.path.relpath(K8S / "overlays" / "gpu", place.resolve())
    (place / "kustomization.yaml").write_text(yaml.safe_dump({"resources": [overlay], **part}))
    return render(str(place))


def check_deployments(part: dict[str, Any], directory: Path) -> None:
    """Ray Serve and the check of the configuration take it beside the arguments of an overlay."""
    config = serve_config(ray_service("multi-model"))
    config["applications"][0] |= part
    ServeDeploySchema.model_validate(config)
    assert unknown_keys(ServeDeploySchema, config) == []
    path = directory / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    found = read_deployed_config(path)
    assert found.built == parse_config(config["applications"][0]["args"]["config"])
    assert found.warnings == ()


def check_command(words: list[str]) -> None:
    program, *arguments = words
    if program == "hdserve":
        check_hdserve(arguments)
    elif program == "make":
        subprocess.run(["make", "-n", *arguments], cwd=ROOT, check=True, capture_output=True)
    elif program == "curl":
        check_curl(arguments)
    elif program == "python":
        check_program(arguments)
    elif program == "kubectl":
        check_kubectl(arguments)
    for option, path in pairwise(arguments):
        if program == "docker" and option == "-f":
            assert (ROOT / path).is_file()


def pod_labels(overlay: str) -> list[dict[str, str]]:
    return [group["template"]["metadata"]["labels"] for group in groups(ray_service(overlay))]


def check_kubectl(arguments: list[str]) -> None:
    """What it applies can be rendered, what it names is applied by something, and what it runs in
    a pod can be run."""
    if "--" in arguments:
        inner = arguments[arguments.index("--") + 1 :]
        arguments = arguments[: arguments.index("--")]
        check_command(inner)
    for option, path in pairwise(arguments):
        if option == "-k" and "github" not in path:
            assert render(path.removeprefix("k8s/"))
    names = {
        f"{manifest['kind']}/{manifest['metadata']['name']}".lower()
        for target in TARGETS
        for manifest in render(target)
    }
    text = re.sub(r"\bcreate job \S+", "", " ".join(arguments))  # a new one
    text = re.sub(r"\bexec (?:-i )?(hdserve\S*)|\bhdserve/(\S+):", r"pod/\1\2 ", text)
    text = re.sub(r"\b(job|pod|secret|rayservice) (hdserve\S*)", r"\1/\2 ", text)
    for selector in re.findall(r"(?:-l |--selector=)(\S+)", text):
        wanted = dict(pair.split("=") for pair in selector.split(","))
        assert any(wanted.items() <= labels.items() for labels in pod_labels("gpu")), selector
    named = set(re.findall(r"\b(?:pod|job|cronjob|rayservice|secret|statefulset)/[\w.-]+", text))
    assert named <= names, named - names


def test_kubectl_asks_for_a_cluster(tmp_path: Path) -> None:
    """Each command is run where nobody answers: its options and files are right, as it gets so
    far."""
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl")
    (tmp_path / "k8s").symlink_to(K8S)
    for name in ("corpora", "my-model"):
        (tmp_path / name).mkdir()
    for name in ("api-keys", "prompts.jsonl", "qwen.hdb"):
        (tmp_path / name).touch()
    nobody = ["--kubeconfig=/dev/null", "--server=http://127.0.0.1:1"]
    for arguments in sorted(
        {tuple(words[1:]) for words in shell_commands() if words[0] == "kubectl"}
    ):
        if any("github.com" in word for word in arguments):
            continue
        found = subprocess.run(
            ["kubectl", *nobody, *arguments], cwd=tmp_path, capture_output=True, text=True
        )
        has_asked = "refused" in found.stderr
        assert has_asked or (found.returncode == 0 and arguments[0] == "kustomize"), found.stderr


class Collected:
    """A plugin that remembers the names of the tests of a run."""

    names: str = ""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = "\n".join(item.nodeid for item in session.items)


def test_named_tests_can_be_collected(capsys: pytest.CaptureFixture[str]) -> None:
    """With the options that are shown."""
    options = [word for words in shell_commands() if words[0] == "pytest" for word in words[1:]]
    assert len(options) > 4
    found = Collected()
    status = pytest.main(["--collect-only", "-qq", *options], plugins=[found])
    assert status == pytest.ExitCode.OK, capsys.readouterr().out
    for path in options:
        assert not path.startswith("tests/") or path in found.names


PROGRAMS = [words[1:] for words in shell_commands() if words[0] == "python"]


@pytest.mark.parametrize("words", PROGRAMS, ids=" ".join)
def test_programs_take_their_options(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their own parsers do; those of ``argparse`` stop at an option that nobody has, when they have
    read all others."""
    path = program_path(words)
    name, options = words[1 if words[0] == "-m" else 0], words[1 + (words[0] == "-m") :]
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    if hasattr(module, "typer"):
        program = typer.Typer()
        program.command()(module.main)
        get_command(program).make_context(name, options)
        return
    monkeypatch.setattr(sys, "argv", [name, *options, "--no-such-option"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("error: unrecognized arguments: --no-such-option\n")


def check_program(arguments: list[str]) -> None:
    """The file exists; one that imports its neighbours is run as a module, so that it finds them.

    What is installed is found anywhere, ``benchmarks``, ``tests`` and ``tools`` are not.
    """
    text = program_path(arguments).read_text()
    imports_neighbours = re.search(r"^from (benchmarks|tests|tools)\.", text, re.M)
    assert arguments[0] == "-m" or not imports_neighbours, f"python -m is needed: {arguments[0]}"


def program_path(arguments: list[str]) -> Path:
    """What ``python`` runs."""
    name = arguments[1].replace(".", "/") if arguments[0] == "-m" else arguments[0]
    (path,) = [
        ROOT / (name + end)
        for end in ("", ".py", "/__main__.py")
        if (ROOT / (name + end)).is_file()
    ]
    return path


def check_hdserve(arguments: list[str]) -> None:
    """The command parses its arguments; nothing is run."""
    current: Any = get_command(hdserve_app)
    while hasattr(current, "commands"):
        assert arguments[0] in current.commands, arguments
        current = current.commands[arguments.pop(0)]
    current.make_context("hdserve", arguments)


def check_curl(arguments: list[str]) -> None:
    """It asks for a route, with a body that is read."""
    (url,) = [word for word in arguments if re.match(r"(http://)?localhost:8000/", word)]
    paths = build_api(Gateway(default_config(), {})).openapi()["paths"]
    path = url.partition(":8000")[2].partition("?")[0]
    assert any(re.fullmatch(re.sub(r"\{.*?\}", ".+", template), path) for template in paths)
    if "-d" in arguments:
        body = json.loads(arguments[arguments.index("-d") + 1])
        assert not ChatBody.parse(body).ignored
