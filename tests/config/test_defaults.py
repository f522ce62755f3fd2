"""What an administrator has requests ask for that do not say."""

from __future__ import annotations

from pathlib import Path

import pytest

from hdserve.config import DefaultsConfig, ModelConfig, load_config
from hdserve.errors import ConfigError


def test_only_what_is_set_is_a_default() -> None:
    """Zeros, too; variables of templates are no parameters of sampling."""
    assert ModelConfig(name="m", model="hdserve-tiny").defaults.sampling == {}
    defaults = DefaultsConfig(temperature=0, max_tokens=9, chat_template_kwargs={"a": None})
    assert defaults.sampling == {"temperature": 0, "max_tokens": 9}


def test_values_have_the_bounds_of_requests(tmp_path: Path) -> None:
    """Each that is wrong is named, with its line."""
    path = tmp_path / "config.yaml"
    path.write_text(
        """
models:
  - name: a
    model: hdserve-tiny
    defaults:
      temperature: 100.5
      top_p: 1.5
      top_k: -2
      min_p: 0.5
      repetition_penalty: 0
      max_tokens: 0
"""
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    _, *found = caught.value.message.splitlines()
    where = "models.0.defaults"
    assert found[:3] == [
        f"line 6, {where}.temperature: temperature must be at least 0.0 and at most 100.0",
        f"line 7, {where}.top_p: top_p must be at least 0.0 and at most 1.0",
        f"line 8, {where}.top_k: top_k must be at least 0, which is off, and at most {2**63 - 1}",
    ]
    assert [line.split(":")[0] for line in found[3:]] == [
        f"line 10, {where}.repetition_penalty",
        f"line 11, {where}.max_tokens",
    ]


def test_no_limit_of_top_k_may_be_written_as_other_servers_do() -> None:
    assert DefaultsConfig(top_k=-1).sampling == {"top_k": 0}
