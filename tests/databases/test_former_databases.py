"""What is forgotten goes from databases of other numbers of shards and other tokenizers, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from hdserve.databases.former_databases import forget_in_former
from hdserve.databases.output_files import database_directory
from hdserve.databases.snapshot import DatabaseKey
from hdserve.databases.stored import describe
from hdserve.errors import DatabaseError, DatabaseInUse
from tests.databases.test_archive import KEY, fill

OTHER_TOKENIZER = DatabaseKey(KEY.model, "e" * 32)
SHARDS = ("", "shard-1-of-2", "shard-2-of-2", "shard-7-of-8")


def names(root: Path, key: DatabaseKey = KEY) -> list[str]:
    return [item.name for item in describe(root, key).namespaces]


def test_every_database_of_the_model(tmp_path: Path) -> None:
    """Of any shard and any tokenizer; other namespaces stay."""
    for label in SHARDS:
        for key in (KEY, OTHER_TOKENIZER):
            fill(tmp_path / label, key).close()
    forget_in_former(tmp_path, KEY, "tenant")
    for label in SHARDS:
        for key in (KEY, OTHER_TOKENIZER):
            assert names(tmp_path / label, key) == ["default"]
    forget_in_former(tmp_path, KEY, "tenant")
    forget_in_former(tmp_path / "none", KEY, "tenant")


def test_no_database_of_another_model(tmp_path: Path) -> None:
    """Not even where directories are called alike."""
    one, other = DatabaseKey("org/model", "f" * 32), DatabaseKey("org_model", "f" * 32)
    for key in (one, other):
        fill(tmp_path, key).close()
    forget_in_former(tmp_path, one, "tenant")
    assert (names(tmp_path, one), names(tmp_path, other)) == (["default"], ["default", "tenant"])


def test_a_database_in_use(tmp_path: Path) -> None:
    """Of an actor that has forgotten it itself is left to that; of another process is named, and
    what the others keep goes."""
    store = fill(tmp_path / "shard-1-of-2")
    fill(tmp_path / "shard-2-of-2").close()
    with pytest.raises(
        DatabaseInUse, match=r"but .*shard-1-of-2.* is being written by another process"
    ):
        forget_in_former(tmp_path, KEY, "tenant")
    assert names(tmp_path / "shard-2-of-2") == ["default"]
    forget_in_former(tmp_path, KEY, "tenant", [store.directory])
    assert names(tmp_path / "shard-1-of-2") == ["default", "tenant"]
    store.close()
    forget_in_former(tmp_path, KEY, "tenant")
    assert names(tmp_path / "shard-1-of-2") == ["default"]


def test_a_database_that_does_not_say_whose_it_is(tmp_path: Path) -> None:
    """May be of the model, if its directory is called so; then it is named."""
    for key in (OTHER_TOKENIZER, DatabaseKey("b-model", KEY.fingerprint)):
        fill(tmp_path, key).close()
        directory = database_directory(tmp_path, key)
        for path in [directory / "generation", *directory.glob("*/state")]:
            path.write_bytes(b"")
        for path in directory.glob("*/*.chunk"):
            path.unlink()
    with pytest.raises(DatabaseError, match=r"a-model-.* cannot be used"):
        forget_in_former(tmp_path, KEY, "tenant")
    fill(tmp_path / "shard-1-of-2").close()
    with pytest.raises(DatabaseError, match=r"a-model-.* cannot be used"):
        forget_in_former(tmp_path, KEY, "tenant")
    assert names(tmp_path / "shard-1-of-2") == ["default"]
