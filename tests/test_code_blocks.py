"""Every code block of README and docs: it is of a kind that is checked, and holds.

Python programs are run in ``test_docs``, ``test_readme`` and ``deployments/test_page``, and so is
``curl``, against a real server.  Here: commands are parsed as the programs they name parse them,
files they name exist, and what is written as YAML, JSON or TOML is that.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from itertools import dropwhile, pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from deployments.gateway import Gateway
from deployments.protocol import ChatBody
from deployments.routes import build_api
from hdserve.cli import app as hdserve_app
from hdserve.config import default_config, parse_config
from tests.k8s.manifests import TARGETS, render

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PYTHON_RUN_ELSEWHERE = {"README.md": 2, "docs/adding-a-draft-source.md": 1, "docs/quickstart.md": 3}
SYSTEM_COMMANDS = {".", "base64", "docker", "echo", "kind", "openssl", "kubectl", "git", "cd", "ls"}


def blocks(path: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each, without the indentation of the list it is in."""
    found = re.findall(
        r"^( *)```(\w*)\n(.*?)^ *```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    for indent, language, text in found:
        yield language, re.sub(f"^{indent}", "", text, flags=re.MULTILINE)


BLOCKS = [
    pytest.param(path, language, text, id=f"{path.relative_to(ROOT)}-{number}-{language or 'text'}")
    for path in PAGES
    for number, (language, text) in enumerate(blocks(path))
]


@pytest.mark.parametrize(("path", "language", "text"), BLOCKS)
def test_block(path: Path, language: str, text: str) -> None:
    if language == "python":
        compile(text, str(path), "exec")
    elif language == "json":
        assert json.loads(text)
    elif language == "toml":
        assert tomllib.loads(text)
    elif language == "yaml":
        check_yaml(yaml.safe_load(text))
    elif language == "sh":
        for words in commands(text):
            check_command(words)
    else:
        assert language in {"", "text"}, f"nobody checks {language}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_programs_are_run(path: Path) -> None:
    """A new Python block needs a test that runs it; then it is counted here."""
    name = str(path.relative_to(ROOT))
    num = sum(language == "python" for language, _ in blocks(path))
    assert num == PYTHON_RUN_ELSEWHERE.get(name, 0)


def check_yaml(data: Any) -> None:
    """A whole configuration, or sections of one."""
    names = {"hierarchy"}
    for model in data.get("models", ()):
        names |= {item["name"] for item in model.get("drafting", {}).get("drafters", ())}
    assert names <= {"hierarchy", "phrase"}
    parse_config({"models": [{"name": "a", "model": "hdserve-tiny"}], **data})


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command, without comments and variables; ``$(...)`` is one of its own."""
    text = re.sub(r"\\\n", " ", text)
    inner = re.findall(r"\$\(([^)]*)\)", text)
    outer = re.sub(r"\$\([^)]*\)", "SUBSTITUTED", text)
    for words in [*_logical_lines(outer), *map(shlex.split, inner)]:
        start = 0
        for index, word in enumerate([*words, "&&"]):
            if word in {"&&", "&", "|", ";", ">"}:
                command = [*dropwhile(re.compile(r"\w+=").match, words[start:index])]
                if command and not (start and words[start - 1] == ">"):
                    yield command
                start = index + 1


def _logical_lines(text: str) -> Iterator[list[str]]:
    """The words of each line; a quotation may go over several."""
    begun = ""
    for line in text.splitlines():
        begun += line
        try:
            words = shlex.split(begun, comments=True)
        except ValueError:
            begun += "\n"
            continue
        begun = ""
        yield words
    assert not begun, text


def check_command(words: list[str]) -> None:
    program, *arguments = words
    if program == "hdserve":
        check_hdserve(arguments)
    elif program == "make":
        subprocess.run(["make", "-n", *arguments], cwd=ROOT, check=True, capture_output=True)
    elif program == "curl":
        check_curl(arguments)
    elif program == "pip":
        assert arguments[0] == "install"
    elif program == "python":
        check_program(arguments)
    elif program == "kubectl":
        check_kubectl(arguments)
    elif program == "pytest":
        assert all((ROOT / path).exists() for path in arguments if path.startswith("tests/"))
    else:
        assert program in SYSTEM_COMMANDS, f"nobody checks {program}"
    for option, path in pairwise(arguments):
        if program == "docker" and option == "-f":
            assert (ROOT / path).is_file()


def check_kubectl(arguments: list[str]) -> None:
    """What it applies can be rendered, what it names is applied by something, and what it runs in
    a pod can be run."""
    if "--" in arguments:
        inner = arguments[arguments.index("--") + 1 :]
        arguments = arguments[: arguments.index("--")]
        check_command(inner[: inner.index("<")] if "<" in inner else inner)
    for option, path in pairwise(arguments):
        if option == "-k" and "github" not in path:
            assert render(path.removeprefix("k8s/"))
    names = {
        f"{manifest['kind']}/{manifest['metadata']['name']}".lower()
        for target in TARGETS
        for manifest in render(target)
    }
    text = " ".join(arguments)
    text = re.sub(r"\bexec (?:-i )?(hdserve\S*)|\bhdserve/(\S+):", r"pod/\1\2 ", text)
    text = re.sub(r"\b(job|pod|secret|rayservice) (hdserve\S*)", r"\1/\2 ", text)
    named = set(re.findall(r"\b(?:pod|job|rayservice|secret)/[\w.-]+", text))
    assert named <= names, named - names


def check_program(arguments: list[str]) -> None:
    """The file exists; one that imports its neighbours is run as a module, so that it finds them.

    What is installed is found anywhere, ``benchmarks``, ``tests`` and ``tools`` are not.
    """
    if arguments[0] == "-c":
        compile(arguments[1], "-c", "exec")
        return
    is_module = arguments[0] == "-m"
    name = arguments[1].replace(".", "/") if is_module else arguments[0]
    (path,) = [
        ROOT / (name + end)
        for end in ("", ".py", "/__main__.py")
        if (ROOT / (name + end)).is_file()
    ]
    imports_neighbours = re.search(r"^from (benchmarks|tests|tools)\.", path.read_text(), re.M)
    assert is_module or not imports_neighbours, f"python -m {name}"


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
    assert url.partition(":8000")[2].partition("?")[0] in paths
    if "-d" in arguments:
        body = json.loads(arguments[arguments.index("-d") + 1])
        assert not ChatBody.parse(body).ignored


def test_what_can_be_run_without_a_server_is(tmp_path: Path) -> None:
    """The ``hdserve`` commands of the quick start that need nothing else."""
    shown = [
        words[1:]
        for language, text in blocks(ROOT / "docs" / "quickstart.md")
        if language == "sh"
        for words in commands(text)
        if words[:2] in (["hdserve", "generate"], ["hdserve", "doctor"])
        and not {"--input", "--config"} & set(words)
    ]
    assert len(shown) == 2
    for arguments in shown:
        more = ["--model", "hdserve-mini", "--max-tokens", "8"] * (arguments[0] == "generate")
        result = CliRunner().invoke(hdserve_app, [*arguments, *more])
        assert result.exit_code in {0, 1} if arguments[0] == "doctor" else result.exit_code == 0
        assert result.stdout
