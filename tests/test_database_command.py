"""``hdserve database build`` as a user calls it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hdserve import LLM
from hdserve.cli.commands import app
from hdserve.core import FinishReason
from hdserve.databases.output_files import database_directory, databases_root
from hdserve.databases.output_store import OutputStore
from hdserve.databases.segment import BYTES_PER_OUTPUT, BYTES_PER_TOKEN
from hdserve.databases.snapshot import FORMAT_VERSION, DatabaseKey
from hdserve.errors import ConfigError, DatabaseError, HdserveError, InvalidRequest, PromptTooLong
from hdserve.models import bundled_model_path
from tests.databases.stored import Database
from tests.trials import shared_trials

QUESTIONS = ("I want to book a table.", "Is there a train to Cambridge?", "A taxi, please.")


@pytest.fixture(scope="module", autouse=True)
def trials() -> Iterator[None]:
    """Each command makes an engine; what it tries out is tested elsewhere."""
    with shared_trials():
        yield


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["database", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.stdout)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in QUESTIONS))
    return path


def test_an_interrupted_build_goes_on(tmp_path: Path, prompts: Path) -> None:
    """Each prompt is answered once, under the name that is served, in its namespace."""
    root = tmp_path / "databases"
    options = ("--prompts", str(prompts), "--model", "hdserve-mini", "--max-tokens", "12")
    build = ("build", str(root), *options, "--name", "mini", "--namespace", "team")
    assert run(*build, "--limit", "1")["num_answered_now"] == 1
    assert run(*build) == {
        "model": "mini",
        "num_prompts": 3,
        "num_answered_now": 2,
        "num_failed": 0,
    }
    assert run(*build)["num_answered_now"] == 0
    (found,) = run("info", str(root))
    assert found["model"] == "mini"
    assert found["namespaces"]["team"]["num_outputs"] == 3
    assert 3 <= found["namespaces"]["team"]["num_tokens"] <= 36


def test_prompts_are_answered_together(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they are more than a server would decode by default."""
    prompts.write_text("".join(json.dumps({"prompt": text * 4}) + "\n" for text in QUESTIONS) * 6)
    slots: list[tuple[int, int]] = []
    generate = LLM.generate

    def noted(llm: LLM, asked: list[Any], *others: Any) -> Any:
        slots.append((len(asked), llm._host.config.engine.max_num_sequences))
        return generate(llm, asked, *others)

    monkeypatch.setattr(LLM, "generate", noted)
    build = ("build", str(tmp_path / "databases"), "--prompts", str(prompts))
    run(*build, "--model", "hdserve-mini", "--max-tokens", "2", "--batch-size", "18")
    assert slots == [(18, 18)]


@contextmanager
def piped(rows: str) -> Iterator[str]:
    """The path of a pipe with these rows, of which nothing is left when it was read."""
    reading, writing = os.pipe()
    os.write(writing, rows.encode())
    os.close(writing)
    yield f"/dev/fd/{reading}"
    os.close(reading)


def test_prompts_may_come_through_a_pipe(tmp_path: Path) -> None:
    """Others than before are not taken for those before."""
    options = ("--model", "hdserve-mini", "--max-tokens", "4")

    def num_answered(*questions: str) -> int:
        rows = "".join(json.dumps({"prompt": question}) + "\n" for question in questions)
        with piped(rows) as path:
            found = run("build", str(tmp_path / "databases"), *options, "--prompts", path)
        return int(found["num_answered_now"])

    assert num_answered(*QUESTIONS) == 3
    assert num_answered(*QUESTIONS) == 0
    assert num_answered(*QUESTIONS[1:]) == 2


def test_the_model_is_that_of_a_server(tmp_path: Path, prompts: Path) -> None:
    """The database is of the name that it has there."""
    config, root = tmp_path / "config.yaml", tmp_path / "databases"
    models = [{"name": "a", "model": "hdserve-tiny"}, {"name": "b", "model": "hdserve-mini"}]
    config.write_text(json.dumps({"models": models}))
    build = ("build", str(root), "--prompts", str(prompts), "--config", str(config))
    options = ("--max-tokens", "4", "--limit", "1")
    assert run(*build, *options, "--model", "b")["model"] == "b"
    (found,) = run("info", str(root))
    assert found["model"] == "b"
    with pytest.raises(ConfigError, match="has no model 'hdserve-mini': there are a, b"):
        run(*build, *options, "--model", "hdserve-mini")


def test_a_configuration_may_come_through_a_pipe(tmp_path: Path, prompts: Path) -> None:
    models = [{"name": "a", "model": "hdserve-mini"}]
    options = ("--prompts", str(prompts), "--max-tokens", "4", "--limit", "1")
    with piped(json.dumps({"models": models})) as path:
        assert run("build", str(tmp_path), *options, "--config", path)["model"] == "a"


def test_a_directory_has_the_name_it_is_served_under(tmp_path: Path, prompts: Path) -> None:
    """Which is the last part, however the path is written."""
    directory = tmp_path / "my-model"
    directory.symlink_to(bundled_model_path("hdserve-mini"))
    options = ("--prompts", str(prompts), "--max-tokens", "4", "--limit", "1")
    for given, num_answered in ((str(directory), 1), (f"{directory}/", 0)):
        found = run("build", str(tmp_path), *options, "--model", given)
        assert (found["model"], found["num_answered_now"]) == ("my-model", num_answered)
    other = directory.rename(tmp_path / "a#b")
    with pytest.raises(ConfigError, match=r"^--model: .* is expected$"):
        run("build", str(tmp_path), *options, "--model", str(other))
    assert (
        run("build", str(tmp_path), *options, "--model", str(other), "--name", "c")["model"] == "c"
    )


@pytest.mark.parametrize(
    "changed",
    [{"chat_template": "other.jinja"}, {"defaults": {"repetition_penalty": 1.1}}],
    ids=str,
)
def test_what_changes_answers_is_answered_again(
    tmp_path: Path, prompts: Path, changed: dict[str, object]
) -> None:
    """A chat template, wherever it is written, and the defaults of requests."""
    config, template = tmp_path / "config.yaml", tmp_path / "one.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    (tmp_path / "other.jinja").write_text(template.read_text() + "!")
    build = ("build", str(tmp_path), "--prompts", str(prompts), "--config", str(config))

    def num_answered(**options: object) -> int:
        if "chat_template" in options:
            options["chat_template"] = str(tmp_path / str(options["chat_template"]))
        model = {"name": "m", "model": "hdserve-mini", **options}
        config.write_text(json.dumps({"models": [model]}))
        return int(run(*build, "--max-tokens", "4")["num_answered_now"])

    options: dict[str, object] = {"chat_template": "one.jinja"}
    assert [num_answered(**options), num_answered(**options)] == [3, 0]
    assert num_answered(**options | {"defaults": {"temperature": 0.5, "max_tokens": 9}}) == 0
    assert num_answered(**options | changed) == 3


def test_an_archive_is_a_file(tmp_path: Path) -> None:
    """It is read several times."""
    with piped("an archive") as path, pytest.raises(ConfigError, match="is no file: pipes"):
        run("import", path, str(tmp_path))


def test_a_namespace_that_no_key_has(tmp_path: Path, prompts: Path) -> None:
    """It is refused before a prompt is answered: nobody would ever draft from the answers."""
    for namespace in ("", "two words", "../team", "a" * 65):
        with pytest.raises(ConfigError, match=r"--namespace .* 1 to 64 letters"):
            run("build", str(tmp_path), "--prompts", str(prompts), "--namespace", namespace)
    assert list(tmp_path.iterdir()) == [prompts]


@pytest.mark.parametrize("name", ["", "a#b", "a%b", "é"])
def test_a_name_that_no_model_is_served_under(tmp_path: Path, prompts: Path, name: str) -> None:
    archive = Path(__file__).parent / "databases" / f"format-{FORMAT_VERSION}.archive"
    with pytest.raises(ConfigError, match=r"^--name: .*(empty|is expected)$"):
        run("build", str(tmp_path), "--prompts", str(prompts), "--name", name)
    with pytest.raises(ConfigError, match=r"^--model: .*(empty|is expected)$"):
        run("import", str(archive), str(tmp_path), "--model", name)
    assert list(tmp_path.iterdir()) == [prompts]


def test_a_temperature_that_no_model_takes(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before a model is loaded, and before there is a database."""
    monkeypatch.setattr(LLM, "__init__", None)
    with pytest.raises(InvalidRequest, match="temperature"):
        run("build", str(tmp_path), "--prompts", str(prompts), "--temperature", "200")
    assert list(tmp_path.iterdir()) == [prompts]


def test_a_prompt_that_is_too_long_is_named_before_any_is_answered(
    tmp_path: Path, prompts: Path
) -> None:
    with prompts.open("a") as file:
        file.write(json.dumps({"prompt": "long " * 3000}) + "\n")
    root, options = tmp_path / "databases", ("--model", "hdserve-mini", "--max-tokens", "4")
    with pytest.raises(PromptTooLong, match=r"^row 4: "):
        run("build", str(root), "--prompts", str(prompts), *options, "--batch-size", "1")
    (found,) = run("info", str(root))
    assert found["namespaces"] == {}


def test_a_build_ends_where_a_server_would_forget(tmp_path: Path, prompts: Path) -> None:
    """The oldest answers would be lost to the newest; those that were kept before stay."""
    root, config = tmp_path / "databases", tmp_path / "config.yaml"
    limits = {"max_bytes": 2**16}
    models = [{"name": "m", "model": "hdserve-mini"}]
    config.write_text(json.dumps({"models": models, "model_database": limits}))
    options = ("--prompts", str(prompts), "--max-tokens", "4", "--batch-size", "1")
    build = ("build", str(root), *options, "--config", str(config))
    run(*build, "--limit", "1")
    (found,) = run("info", str(root))
    key = DatabaseKey("m", found["tokenizer_fingerprint"])
    database = Database(database_directory(root, key), key)
    room = 2**16 - 2 * database.log.num_bytes  # then one more answer fits
    database.append("default", 1, length=(room - BYTES_PER_OUTPUT) // BYTES_PER_TOKEN)
    assert database.sync()
    database.store.close()
    with pytest.raises(DatabaseError, match=r"default would have 65,.*max_bytes` is 65,536"):
        run(*build)
    (found,) = run("info", str(root))
    assert found["namespaces"]["default"]["num_outputs"] == 3


def test_a_build_ends_where_nothing_more_can_be_written(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts whose answers could not be kept are not answered; the same command goes on."""
    root = tmp_path / "databases"
    build = ("build", str(root), "--prompts", str(prompts), "--model", "hdserve-mini")
    options = ("--max-tokens", "4", "--batch-size", "1")
    assert run(*build, *options, "--limit", "1")["num_answered_now"] == 1
    (log,) = databases_root(root).glob("*/*/*")
    directory, aside, asked = log.parent, tmp_path / "aside", []
    directory.rename(aside)
    directory.write_text("in the way")
    generate = LLM.generate
    monkeypatch.setattr(LLM, "generate", lambda *args: asked.append(1) or generate(*args))
    with pytest.raises(DatabaseError, match="cannot be written"):
        run(*build, *options)
    assert len(asked) == 1
    directory.unlink()
    aside.rename(directory)
    assert run(*build, *options)["num_answered_now"] == 2


def test_an_answer_that_failed_is_not_kept(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are; the reason is told, and the same command answers that prompt again."""
    generate, failing = LLM.generate, ["could not be decoded", "of another reason"]

    def failed(llm: LLM, *arguments: Any) -> Any:
        first, *others = generate(llm, *arguments)
        error = HdserveError(failing.pop(0))
        return [replace(first, finish_reason=FinishReason.ERROR, error=error), *others]

    root = tmp_path / "databases"
    build = ["build", str(root), "--prompts", str(prompts), "--model", "hdserve-mini"]
    build += ["--max-tokens", "4", "--batch-size", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(LLM, "generate", failed)
        result = CliRunner().invoke(app, ["database", *build, "--json"], catch_exceptions=False)
    told = "hdserve: 2 answers failed and were not kept: could not be decoded; the same command"
    assert told in result.stderr
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["num_answered_now"], found["num_failed"]) == (1, 2)
    assert run("info", str(root))[0]["namespaces"]["default"]["num_outputs"] == 1
    assert run(*build)["num_answered_now"] == 2
    assert run("info", str(root))[0]["namespaces"]["default"]["num_outputs"] == 3


def test_databases_of_shards_are_named(tmp_path: Path) -> None:
    """Where there are no others, and beside those from before the namespaces were shared out."""
    shard = tmp_path / "shard-1-of-2"
    archive = Path(__file__).parent / "databases" / f"format-{FORMAT_VERSION}.archive"
    assert run("import", str(archive), str(shard))["num_new_outputs"] == 4
    with pytest.raises(DatabaseError, match=r"/shard-1-of-2 is one of a shard"):
        run("info", str(tmp_path))
    assert run("import", str(archive), str(tmp_path / "before"))["num_new_outputs"] == 4
    databases_root(tmp_path / "before").rename(databases_root(tmp_path))
    told = CliRunner().invoke(app, ["database", "info", str(tmp_path)], catch_exceptions=False)
    assert f"{shard} is not read: it is one of a shard" in told.stdout


def test_nothing_is_written_beside_the_databases_of_shards(tmp_path: Path, prompts: Path) -> None:
    """Where no server would read it."""
    root = tmp_path / "databases"
    archive = Path(__file__).parent / "databases" / f"format-{FORMAT_VERSION}.archive"
    run("import", str(archive), str(root / "shard-2-of-2"))
    build = ("build", str(root), "--prompts", str(prompts), "--model", "hdserve-mini")
    for command in (("import", str(archive), str(root)), build):
        with pytest.raises(DatabaseError, match=r"databases of shards \(shard-2-of-2\).*/import"):
            run(*command)
    assert not databases_root(root).exists()


def test_nothing_is_written_where_a_server_with_shards_reads_nothing(
    tmp_path: Path, prompts: Path
) -> None:
    """Before it has written, too; the directory of one of its shards can be restored."""
    root, config = tmp_path / "databases", tmp_path / "config.yaml"
    archive = Path(__file__).parent / "databases" / f"format-{FORMAT_VERSION}.archive"
    models = [{"name": "m", "model": "hdserve-mini"}]
    config.write_text(json.dumps({"models": models, "model_database": {"num_shards": 2}}))
    for place in (root, root / "shard-1-of-4"):
        import_ = ("import", str(archive), str(place))
        for command in (import_, ("build", str(place), "--prompts", str(prompts))):
            with pytest.raises(DatabaseError, match=r"num_shards: 2 reads: .*/MODEL/import"):
                run(*command, "--config", str(config))
    assert not root.exists()
    run("import", str(archive), str(root / "shard-1-of-2"), "--config", str(config))


def test_what_no_longer_grows_is_not_exported(tmp_path: Path) -> None:
    """From before the namespaces were shared out: a backup of it would pass for one of today."""
    archive = Path(__file__).parent / "databases" / f"format-{FORMAT_VERSION}.archive"
    root, shard, copy = tmp_path / "databases", tmp_path / "databases/shard-1-of-2", tmp_path / "a"
    run("import", str(archive), str(root))
    run("import", str(archive), str(shard))
    with pytest.raises(DatabaseError, match=r"\(shard-1-of-2\).* nothing more: .*/MODEL/export"):
        run("export", str(root), str(copy))
    assert not copy.exists()
    assert run("export", str(shard), str(copy))["num_outputs"] == 4


def test_a_shard_beside_those_of_another_number_is_not_exported(tmp_path: Path) -> None:
    """The number was changed, and only the shards of the new one grow."""
    archive = Path(__file__).parent / "databases" / f"format-{FORMAT_VERSION}.archive"
    old, *new = [tmp_path / f"shard-{name}" for name in ("1-of-2", "1-of-4", "2-of-4")]
    copy = tmp_path / "copy"
    for shard in (old, *new):
        run("import", str(archive), str(shard))
    for shard, other in ((old, "shard-1-of-4"), (new[0], "shard-1-of-2")):
        told = rf"/{shard.name} lies beside {other}, .*move away those"
        with pytest.raises(DatabaseError, match=told):
            run("export", str(shard), str(copy))
    assert not copy.exists()
    old.rename(tmp_path / "away")
    assert run("export", str(new[0]), str(copy))["num_outputs"] == 4


def test_outputs_of_another_tokenizer(tmp_path: Path) -> None:
    """They are refused where the model's database is there: it would not draft from them.  Where a
    model had another tokenizer before, both databases are shown."""
    root, archives, keys = tmp_path / "databases", [], []
    for number in range(2):
        keys.append(DatabaseKey("mini", f"{number}" * 64))
        make_database(tmp_path / str(number), keys[-1])
        archives.append(str(tmp_path / f"{number}.archive"))
        run("export", str(tmp_path / str(number)), archives[-1])
    run("import", archives[0], str(root))
    for options in ((), ("--model", "mini")):
        with pytest.raises(DatabaseError, match=r"mini has the tokenizer 0+, the outputs are of 1"):
            run("import", archives[1], str(root), *options)
        run("import", archives[0], str(root), *options)
    run("import", archives[1], str(root), "--model", "other")
    make_database(root, keys[1])
    run("import", archives[1], str(root))
    found = run("info", str(root), "--model", "mini")
    assert [item["tokenizer_fingerprint"][0] for item in found] == ["0", "1"]
    with pytest.raises(DatabaseError, match="no database of 'none'"):
        run("info", str(root), "--model", "none")


def make_database(root: Path, key: DatabaseKey) -> None:
    """An empty one."""
    OutputStore(database_directory(root, key), key).close()


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="holds no model database"):
        run("info", str(tmp_path))
