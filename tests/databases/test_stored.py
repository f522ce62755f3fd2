"""Model databases on disk are found by their models, and told from what is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hdserve.cli.commands import app
from hdserve.databases import archive as archives
from hdserve.databases import stored
from hdserve.databases.output_files import database_directory, databases_root
from hdserve.databases.output_log import OutputLog
from hdserve.databases.output_store import OutputStore
from hdserve.databases.snapshot import DatabaseKey
from hdserve.errors import DatabaseError
from tests.closed import closed, open_directory
from tests.databases.test_archive import KEY, fill


def test_a_database_is_found_by_its_model(tmp_path: Path) -> None:
    """And the message names those there are when it is not."""
    with pytest.raises(DatabaseError, match="holds no model database"):
        stored.find_databases(tmp_path)
    with pytest.raises(DatabaseError, match=f"there is no directory {tmp_path / 'none'}"):
        stored.find_databases(tmp_path / "none")
    fill(tmp_path).close()
    assert stored.find_database(tmp_path, None) == KEY
    fill(tmp_path, DatabaseKey("b-model", KEY.fingerprint)).close()
    assert stored.find_database(tmp_path, "b-model").model == "b-model"
    with pytest.raises(DatabaseError, match="more than one"):
        stored.find_database(tmp_path, None)
    with pytest.raises(DatabaseError, match=r"no database of 'c'.*a-model.*b-model"):
        stored.find_database(tmp_path, "c")


def test_of_two_tokenizers_of_a_model_one_is_chosen(tmp_path: Path) -> None:
    """By the digits that are shown; the message names the option."""
    other = DatabaseKey(KEY.model, "e" * 32)
    for key in (KEY, other, DatabaseKey("b-model", "e" * 32)):
        fill(tmp_path, key).close()
    with pytest.raises(
        DatabaseError, match=r"of 'a-model': --fingerprint says which; .*eeee.*ffff"
    ):
        stored.find_database(tmp_path, KEY.model)
    with pytest.raises(DatabaseError, match=r"--model says which"):
        stored.find_database(tmp_path, None, "ee")
    with pytest.raises(DatabaseError, match=r"no database of 'a-model' with the tokenizer 'd'"):
        stored.find_database(tmp_path, KEY.model, "d")
    assert stored.find_database(tmp_path, KEY.model, "eee") == other
    arguments = ["export", str(tmp_path), str(tmp_path / "file"), "--fingerprint", "f", "--json"]
    told = CliRunner().invoke(app, ["database", *arguments], catch_exceptions=False)
    assert json.loads(told.stdout)["tokenizer_fingerprint"] == KEY.fingerprint


def test_a_database_is_found_though_the_file_that_names_it_is_damaged(tmp_path: Path) -> None:
    """By its other files; where there are none the message names it."""
    for key in (KEY, DatabaseKey("b-model", KEY.fingerprint)):
        fill(tmp_path, key).close()
    generation = database_directory(tmp_path, KEY) / "generation"
    generation.write_bytes(bytes(50))
    assert KEY in stored.find_databases(tmp_path)
    assert archives.export_database(tmp_path, KEY, tmp_path / "copy").num_outputs == 60
    for path in generation.parent.glob("*/*"):
        path.unlink()
    with pytest.raises(DatabaseError, match=r"a-model-\w+/generation cannot be used: .*corrupt"):
        stored.find_databases(tmp_path)


def test_what_was_forgotten_is_not_described(tmp_path: Path) -> None:
    """Nor what never was there and was forgotten; readers are told of both after a restart."""
    fill(tmp_path).close()
    store = OutputStore(database_directory(tmp_path, KEY), KEY)
    log = OutputLog(10**9, 10**9, first_version=store.first_version)
    store.restore(log)
    for namespace in ("tenant", "tennant"):
        log.flush(namespace)
        store.flush(namespace, log)
    log.set_calibration("learned", b"of no output")
    store.state_changed("learned")
    assert store.sync(log)
    store.close()
    found = stored.describe(tmp_path, KEY)
    assert [(item.name, item.num_outputs) for item in found.namespaces] == [
        ("default", 30),
        ("learned", 0),
    ]
    _, kept = stored.open_to_read(tmp_path, KEY)
    assert set(kept.flushes_since({"tenant": 1, "tennant": 1})) == {"tenant", "tennant"}


def test_databases_of_another_version_are_named_with_what_to_do(tmp_path: Path) -> None:
    fill(tmp_path).close()
    (tmp_path / "v1").rename(tmp_path / "v0")
    others = tmp_path / "various" / "files"
    others.mkdir(parents=True)
    (others / "generation").touch()
    with pytest.raises(DatabaseError, match=r"holds no model database; .*/v0/a-model-.* export it"):
        stored.find_databases(tmp_path)
    (tmp_path / "v0").rename(tmp_path / "v2")
    with pytest.raises(DatabaseError, match=r"/v2/a-model-.*: use the hdserve that wrote it"):
        stored.find_databases(tmp_path)
    fill(tmp_path).close()
    assert stored.find_databases(tmp_path) == [KEY]
    shown = CliRunner().invoke(app, ["database", "info", str(tmp_path)], catch_exceptions=False)
    assert "/v2/a-model-" in shown.stdout
    assert "use the hdserve that wrote it" in shown.stdout


def test_a_closed_directory_is_not_one_without_databases() -> None:
    """Neither one of a database, nor one of all, nor one above."""
    with open_directory() as root:
        (root / "inner").mkdir()
        fill(root).close()
        directory = database_directory(root, KEY)
        with closed(directory):
            with pytest.raises(DatabaseError, match=rf"^{directory}/generation .* Permission den"):
                stored.find_databases(root)
            stored.check_tokenizer(root, KEY)
        assert stored.find_databases(root) == [KEY]
        with closed(databases_root(root)), pytest.raises(DatabaseError, match="cannot be read"):
            stored.find_databases(root)
        for call in (stored.find_databases, stored.shard_directories, stored.check_unsharded):
            for place in (root, root / "inner"):
                told = f"^{place} cannot be read"
                with closed(root), pytest.raises(DatabaseError, match=told):
                    call(place)
