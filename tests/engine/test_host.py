"""What a model's host lets its requests know of one another, and what ends them."""

from __future__ import annotations

import json
import math
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from hdserve.config import ModelConfig
from hdserve.core import FinishReason, Source
from hdserve.databases.statistics_builder import StatisticsBuilder
from hdserve.engine.engine import Engine
from hdserve.engine.host import ModelHost, first_directory
from hdserve.engine.loading import exactness
from hdserve.errors import ConfigError, InvalidRequest, UnsupportedModel
from hdserve.models import resolve_model
from tests.closed import closed
from tests.engines import make_sequence, run


def test_a_wrong_drafter_is_told_before_anything_is_loaded() -> None:
    config = {"name": "m", "model": "/nowhere", "drafting": {"drafters": [{"name": "phrase"}]}}
    with pytest.raises(ConfigError, match="unknown drafter 'phrase'"):
        ModelHost(ModelConfig.model_validate(config))


def test_a_missing_compiler_is_told_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the model must be compiled; the headers of Python belong to it."""
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path))
    config = {"name": "m", "model": "/nowhere", "engine": {"compile": True}}
    with pytest.raises(ConfigError, match=r"^engine\.compile: true needs a C\+\+ compiler"):
        ModelHost(ModelConfig.model_validate(config))


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_model_that_does_not_share_keeps_nothing(is_shared: bool) -> None:
    """Not of answers that have ended, nor of those that run beside others, nor what the model
    thought likely in them."""
    config = {
        "name": "m",
        "model": "hdserve-mini",
        "share_output": is_shared,
        "engine": {"compile": False, "kv_cache_tokens": 1024},
        "drafting": {"adapts_budget": False},
    }
    host = ModelHost(ModelConfig.model_validate(config))
    engine = host.make_engine()
    run(engine, [make_sequence(name, [5, 300, 41, 7], temperature=0.0) for name in "ab"])
    database = host.own_database
    assert (database.num_tokens > 0) is is_shared
    assert (database.num_recycled_entries > 0) is is_shared


def test_drafts_come_from_what_other_models_generated() -> None:
    """Those that the configuration names; the model itself has generated nothing yet."""
    config = {
        "name": "m",
        "model": "hdserve-mini",
        "engine": {"compile": False, "kv_cache_tokens": 1024},
        "drafting": {"adapts_budget": False},
    }
    alone, drafted = (make_sequence(name, [5, 300, 41, 7], temperature=0.0) for name in "ab")
    run(ModelHost(ModelConfig.model_validate(config)).make_engine(), [alone])
    host = ModelHost(ModelConfig.model_validate({**config, "draft_from": ["n", "o"]}))
    host.apply("o", "default", [alone.output_token_ids])
    run(host.make_engine(), [drafted])
    assert Source.MODEL not in alone.counts.accepted_by_source
    assert drafted.counts.accepted_by_source[Source.MODEL] > 0


def test_outputs_that_end_together_are_added_one_by_one_between_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And those that were flushed meanwhile not at all; one that cannot be added is counted."""
    config = {
        "name": "m",
        "model": "hdserve-mini",
        "engine": {"compile": False, "kv_cache_tokens": 1024},
        "drafting": {"adapts_budget": False, "drafters": []},
    }
    waiting: list[Callable[[Engine], None]] = []
    host = ModelHost(ModelConfig.model_validate(config), between_steps=waiting.append)
    engine = host.make_engine()
    sequences = [make_sequence(name, [5, 300, 41, 7], temperature=0.0) for name in "abc"]
    sequences[1].namespace = "flushed"
    run(engine, sequences)
    assert host.own_database.num_entries == 0
    assert len(waiting) == 3
    waiting[0](engine)
    assert host.own_database.num_entries == 1
    host.forget(engine, "m", "flushed")
    for command in waiting[1:]:
        command(engine)
    assert host.own_database.namespaces == ("default",)
    assert host.own_database.num_entries == 2
    monkeypatch.setattr(host.own_database, "record", lambda _: 1 // 0)
    run(engine, [make_sequence("d", [5, 300], temperature=0.0)])
    waiting[-1](engine)
    assert engine.drafters.num_failures["engine", "on_finish"] == 1


def test_engines_of_a_host_are_all_exact_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a second measurement of the same cost would find."""
    config = {
        "name": "m",
        "model": "hdserve-mini",
        "engine": {"compile": False, "kv_cache_tokens": 1024},
        "drafting": {"adapts_budget": False},
    }
    host = ModelHost(ModelConfig.model_validate(config))
    found = []
    for affordable in (0.0, math.inf):
        monkeypatch.setattr(exactness, "_AFFORDABLE_COST", affordable)
        found.append(host.make_engine().is_exact)
    assert found[0] == found[1]


@pytest.mark.parametrize("named", [[0], None, 10**6])
def test_the_end_the_tokenizer_names_ends_a_sequence(tmp_path: Path, named: object) -> None:
    """Whatever the generation config says: those of many tuned models were made for other ends."""
    path = copytree(resolve_model("hdserve-mini"), tmp_path / "model")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    engine = {"compile": False, "kv_cache_tokens": 1024, "exact": False}
    config = {"name": "m", "model": str(path), "engine": engine}
    host = ModelHost(ModelConfig.model_validate({**config, "drafting": {"adapts_budget": False}}))
    assert host.tokenizer.eos_token_id is not None
    bias = {host.tokenizer.eos_token_id: 100.0}
    seq = make_sequence("a", [5, 300, 41, 7], temperature=0.0, logit_bias=bias, min_tokens=3)
    run(host.make_engine(), [seq])
    assert (seq.finish_reason, seq.num_output_tokens) == (FinishReason.STOP, 4)


def test_statistics_that_may_not_be_looked_at_are_none(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    with closed(tmp_path):
        assert first_directory([tmp_path / "s"], "") is None
    assert first_directory([tmp_path / "s"], "") == tmp_path / "s"


@pytest.mark.parametrize(
    ("name", "said"),
    [("none", "no statistics database at"), ("foreign", "drafting without statistics")],
)
def test_a_model_is_served_without_statistics_that_cannot_be_used(
    tmp_path: Path, name: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that are not there, and those of another tokenizer."""
    builder = StatisticsBuilder("another", 100, max_bytes=1 << 20)
    builder.add("corpus", [5, 6, 7])
    builder.write(tmp_path / "foreign")
    config = {
        "name": "m",
        "model": "hdserve-mini",
        "statistics": str(tmp_path / name),
        "engine": {"compile": False, "kv_cache_tokens": 1024, "exact": False},
        "drafting": {"adapts_budget": False},
    }
    host = ModelHost(ModelConfig.model_validate(config))
    assert host.statistics is None
    assert f"m: {said}" in caplog.text
    seq = make_sequence("a", [5, 300, 41, 7], max_tokens=4)
    run(host.make_engine(), [seq])
    assert seq.num_output_tokens


def test_statistics_that_come_late_are_found_by_another_look(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever looks again and again does not say each time that there are none."""
    config = ModelConfig.model_validate(
        {
            "name": "m",
            "model": "hdserve-mini",
            "statistics": str(tmp_path / "late"),
            "engine": {"compile": False, "kv_cache_tokens": 1024, "exact": False},
        }
    )
    host = ModelHost(config)
    assert [host.find_statistics() for _ in range(2)] == [None, None]
    builder = StatisticsBuilder(host.tokenizer.fingerprint, 100, max_bytes=1 << 20)
    builder.add("corpus", [5, 6, 7])
    builder.write(tmp_path / "late")
    found = host.find_statistics()
    assert found is not None
    assert found.directory == tmp_path / "late"
    assert host.statistics is None, "who looks has it used in the engine's thread"
    assert caplog.text.count("no statistics database") == 1


def test_statistics_that_are_off_are_looked_for_nowhere() -> None:
    """The cluster may have some of the tokenizer, for another model."""
    engine = {"compile": False, "kv_cache_tokens": 1024, "exact": False}
    config = {"name": "m", "model": "hdserve-tiny", "engine": engine, "statistics": None}

    def locate(_directories: Iterable[Path], _fingerprint: str) -> Path | None:
        raise AssertionError

    host = ModelHost(ModelConfig.model_validate(config), locate_statistics=locate)
    assert host.statistics is None
    assert host.find_statistics() is None


def test_a_model_that_is_not_served_is_missed_no_tokenizer(tmp_path: Path) -> None:
    """One of pictures has none, and none would help."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    config = ModelConfig.model_validate({"name": "m", "model": str(tmp_path)})
    with pytest.raises(UnsupportedModel, match=r"^vit \(.*no causal language model"):
        ModelHost(config)


def test_a_revision_is_that_of_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tokenizer, of the weights, and of what the model's authors recommend."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    kept = tmp_path / "models--OWNER--MODEL"
    (kept / "refs").mkdir(parents=True)
    for name, source in (("main", "hdserve-tiny"), ("v1", "hdserve-mini")):
        (kept / "refs" / name).write_text(f"commit-{name}")
        copytree(resolve_model(source), kept / "snapshots" / f"commit-{name}")
    place = kept / "snapshots" / "commit-v1"
    (place / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.5}))
    tokenizer = json.loads((place / "tokenizer.json").read_text())
    (place / "tokenizer.json").write_text(
        json.dumps({**tokenizer, "normalizer": {"type": "Lowercase"}})
    )
    wanted, found, other = (
        ModelHost(ModelConfig.model_validate({"name": "m", **model, "engine": {"compile": False}}))
        for model in (
            {"model": str(place)},
            {"model": "OWNER/MODEL", "revision": "v1"},
            {"model": "OWNER/MODEL"},
        )
    )
    assert found.tokenizer.fingerprint == wanted.tokenizer.fingerprint
    assert found.model.default_sampling == wanted.model.default_sampling
    weight, own = (next(host.model.module.parameters()) for host in (wanted, found))
    assert torch.equal(own, weight)
    assert other.tokenizer.fingerprint != wanted.tokenizer.fingerprint
    assert other.model.default_sampling == {}
    assert next(other.model.module.parameters()).shape != weight.shape


def test_what_a_client_leaves_open(tmp_path: Path) -> None:
    """Is as the configuration has it, else as the checkpoint, and last as the API has it."""
    path = copytree(resolve_model("hdserve-mini"), tmp_path / "model")
    own = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 40}
    (path / "generation_config.json").write_text(json.dumps({**own, "eos_token_id": 2}))
    config = {"name": "m", "model": str(path), "engine": {"compile": False}}
    of_api = {"max_tokens": 16, "top_p": 0.5, "min_tokens": 2}
    cases: list[tuple[dict[str, Any], dict[str, Any], tuple[float, ...]]] = [
        ({}, {}, (0.6, 0.9, 40, 16)),
        ({"temperature": 0.0, "max_tokens": 9}, {}, (0.0, 0.9, 40, 9)),
        ({"temperature": 0.0, "max_tokens": 9}, {"temperature": 1, "top_k": 0}, (1, 0.9, 0, 9)),
        ({"max_tokens": 9}, {"max_tokens": 10}, (0.6, 0.9, 40, 10)),
        ({"max_tokens": 9}, {"min_tokens": 12}, (0.6, 0.9, 40, 12)),
        ({}, {"min_tokens": 17}, (0.6, 0.9, 40, 17)),
        ({"max_tokens": 9}, {}, (0.6, 0.9, 40, 9)),
    ]
    for defaults, chosen, wanted in cases:
        host = ModelHost(ModelConfig.model_validate({**config, "defaults": defaults}))
        found = host.params(chosen, of_api)
        assert (found.temperature, found.top_p, found.top_k, found.max_tokens) == wanted
        assert found.min_tokens == chosen.get("min_tokens", 2)
    assert host.params({}).max_tokens == 9
    for wrong in ("3", None, [3]):
        with pytest.raises(InvalidRequest, match="min_tokens must be an integer"):
            host.params({"min_tokens": wrong})
