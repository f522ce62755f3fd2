"""The model of a command without a server, as a server's configuration has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hdserve.cli.model_option import chosen_model, given, load_llm, with_options
from hdserve.config import ModelConfig
from hdserve.engine.hardware.cpu_count import available_cpus, default_num_threads
from hdserve.errors import ConfigError

CONFIG = """
models:
- name: first
  model: hdserve-tiny
- name: second
  model: hdserve-mini
  aliases: [other]
  num_cpus: 1
  engine: {dtype: float32, compile: false, kv_cache_tokens: 4096}
  drafting: {max_draft_tokens: 3}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


def test_without_a_configuration_it_is_what_is_named() -> None:
    assert chosen_model("hdserve-mini", None).model == "hdserve-mini"
    assert chosen_model(None, None).model == "hdserve-tiny"
    with pytest.raises(ConfigError, match="no bundled model is called hdserve-none"):
        chosen_model("hdserve-none", None)


def test_it_is_the_one_of_that_name(config: Path) -> None:
    """Or of another one of its names; the first if none is named."""
    assert chosen_model(None, config).name == "first"
    for name in ("second", "other"):
        assert chosen_model(name, config).drafting.max_draft_tokens == 3
    told = f"{config} has no model 'hdserve-mini': there are first, second"
    with pytest.raises(ConfigError, match=told):
        chosen_model("hdserve-mini", config)


def test_threads_are_those_of_a_replica(config: Path) -> None:
    """Some forwards are exact with some numbers of threads only."""
    assert chosen_model("second", config).engine.num_threads == 1
    shared = chosen_model("first", config).engine.num_threads
    assert shared == default_num_threads(0.5, 2, available_cpus())
    config.write_text(CONFIG.replace("engine: {", "engine: {num_threads: 3, "))
    assert chosen_model("second", config).engine.num_threads == 3


def test_the_device_is_that_of_a_replica(config: Path) -> None:
    """Which sees no GPU that it has not reserved."""
    for number, device in ((0, "cpu"), (0.5, "auto")):
        config.write_text(CONFIG.replace("num_cpus: 1", f"num_gpus: {number}"))
        assert chosen_model("second", config).engine.device == device
        assert chosen_model("first", config).engine.device == "auto"


def test_what_deploys_a_configuration_has_one(config: Path) -> None:
    application = {"import_path": "deployments:app", "args": {"config": str(config)}}
    deploy = config.with_name("serve.json")
    deploy.write_text(json.dumps({"applications": [application]}))
    assert chosen_model("second", deploy) == chosen_model("second", config)


def test_options_of_a_command_come_before_those_of_the_file(config: Path) -> None:
    """The others stay, and so does what was never chosen."""
    model = chosen_model("second", config)
    changed = with_options(model, engine=given(dtype="bfloat16", exact=None), drafting={})
    assert (changed.engine.dtype, changed.engine.exact) == ("bfloat16", "auto")
    assert changed.engine.kv_cache_tokens == 4096
    assert "prefill_slowdown" not in changed.engine.model_fields_set
    assert with_options(model) == model
    with pytest.raises(ConfigError, match=r"engine\.dtype"):
        with_options(model, engine={"dtype": "int3"})


def test_it_is_loaded_with_all_its_settings(config: Path) -> None:
    """And, as nobody reads along, without a pace of prompts, unless one is set."""
    model = chosen_model("second", config)
    found = load_llm(model)._host
    expected = model.engine.model_copy(update={"prefill_slowdown": None})
    assert found.config == model.model_copy(update={"engine": expected})
    assert found.num_threads == 1
    assert str(found.model.dtype) == "torch.float32"


def test_every_key_of_a_model_survives_the_way_to_it(tmp_path: Path) -> None:
    """Also those whose values are no numbers or texts."""
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    values = {
        "name": "m",
        "model": "hdserve-mini",
        "chat_template": str(template),
        "aliases": ["a", "b"],
        "draft_from": ["c"],
        "defaults": {"temperature": 0.5, "chat_template_kwargs": {"a": [1, {"b": None}]}},
        "drafting": {"drafters": [{"name": "hierarchy", "options": {"context": False}}]},
        "autoscaling": {"policy": {"policy_function": "json:dumps", "policy_kwargs": {"a": 1}}},
        "resources": {"rack": 0.5},
    }
    model = ModelConfig.model_validate(values)
    assert with_options(model) == model
    assert with_options(model).model_fields_set == model.model_fields_set
