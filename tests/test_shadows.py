"""Directories that are imported in place of the installed packages are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from hdserve.cli.serve import check_is_importable
from hdserve.doctor.machine import check_packages
from hdserve.errors import ConfigError
from hdserve.shadows import shadows

ROOT = Path(__file__).parent.parent


def test_a_package_or_module_of_the_same_name(tmp_path: Path) -> None:
    """Whatever it has in it; what cannot be imported hides no less."""
    assert list(shadows(tmp_path)) == []
    package = tmp_path / "hdserve"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (tmp_path / "actors").mkdir()
    (tmp_path / "actors" / "__init__.py").write_text("raise RuntimeError")
    module = tmp_path / "deployments.py"
    module.write_text("")
    assert list(shadows(tmp_path)) == [package, tmp_path / "actors", module]


def test_the_clone_itself_hides_nothing() -> None:
    """It holds the packages that are meant; a command may be run in it."""
    assert list(shadows(ROOT)) == []
    check_is_importable(ROOT)


def test_it_is_told_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "deployments"
    package.mkdir()
    (package / "__init__.py").write_text("")
    with pytest.raises(ConfigError, match="deployments hides the installed package from Ray"):
        check_is_importable(tmp_path)
    monkeypatch.chdir(tmp_path)
    first = next(check_packages())
    assert (first.verdict, first.subject) == ("failure", "packages")
    assert str(package) in first.text
