"""The code blocks of README and docs, as a Markdown parser finds them, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(path: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each, wherever it is; one that is only indented has no language."""
    for token in MarkdownIt().parse(path.read_text(encoding="utf-8")):
        if token.type in {"fence", "code_block"}:
            yield token.info, token.content


def texts(page: str, language: str) -> list[str]:
    """The blocks of one page in one language."""
    return [text for found, text in blocks(ROOT / page) if found == language]


def measured(page: str, section: str, model: str) -> dict[str, tuple[str, str]]:
    """What each contender did there over all tasks, one sequence at a time: tokens per second, and
    the median of its ratios to plain decoding."""
    text = (ROOT / page).read_text(encoding="utf-8")
    (part,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    (part,) = re.findall(rf"^### {model}\n(.*?)(?=^##|\Z)", part, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| 1 \| all \| (\S+) \| (\d+) \| ([\d.]+) \(", part, re.MULTILINE)
    return {contender: (rate, ratio) for contender, rate, ratio in rows}


def shell_commands() -> Iterator[list[str]]:
    """All of all pages."""
    for path in PAGES:
        for language, text in blocks(path):
            if language == "sh":
                yield from commands(text)


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command, without comments, variables and what it reads from;
    ``$(...)`` is one of its own."""
    text = re.sub(r"\\\n", " ", text)
    inner = re.findall(r"\$\(([^)]*)\)", text)
    outer = re.sub(r"\$\([^)]*\)", "SUBSTITUTED", text)
    for words in [*_logical_lines(outer), *map(shlex.split, inner)]:
        start = 0
        for index, word in enumerate([*words, "&&"]):
            if word in {"&&", "&", "|", ";", ">", ">>", "<"}:
                command = [*dropwhile(re.compile(r"\w+=").match, words[start:index])]
                is_file = start and words[start - 1] in {">", ">>", "<"}
                if command and not is_file:
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
