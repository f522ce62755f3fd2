"""A configuration is read once, strictly, and every mistake is named."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from hdserve.config import (
    ADMIN_KEY_ENVIRONMENT_VARIABLE,
    ADMIN_KEY_FILE_ENVIRONMENT_VARIABLE,
    API_KEYS_FILE_ENVIRONMENT_VARIABLE,
    CONFIG_ENVIRONMENT_VARIABLE,
    DraftingConfig,
    EngineConfig,
    ModelConfig,
    ServeConfig,
    default_config,
    load_config,
    parse_config,
)
from hdserve.errors import ConfigError
from hdserve.models import bundled_models

ONE_MODEL: dict[str, Any] = {"models": [{"name": "a", "model": "hdserve-tiny"}]}


def refused(data: Any) -> str:
    """The message with which ``data`` is refused."""
    with pytest.raises(ConfigError) as caught:
        parse_config(data)
    return caught.value.message


def with_model(**options: Any) -> dict[str, Any]:
    return {"models": [{**ONE_MODEL["models"][0], **options}]}


@pytest.mark.parametrize(
    ("data", "where", "near", "known"),
    [
        ({**ONE_MODEL, "gatway": {}}, "gatway", "gateway", "gateway, model_database, models"),
        ({**ONE_MODEL, "gateway": {"num_replica": 2}}, "gateway.num_replica", "num_replicas", ""),
        (with_model(modle="x"), "models.0.modle", "model", "draft_from, drafting, engine"),
        (
            with_model(autoscaling={"min_replicas": 1, "max_replica": 8}),
            "models.0.autoscaling.max_replica",
            "max_replicas",
            "target_ongoing_requests",
        ),
        (
            with_model(engine={"dtypes": "float32"}),
            "models.0.engine.dtypes",
            "dtype",
            "kv_cache_tokens",
        ),
        (
            with_model(drafting={"drafters": [{"name": "hierarchy", "option": {}}]}),
            "models.0.drafting.drafters.0.option",
            "options",
            "name, options",
        ),
    ],
)
def test_unknown_keys_name_the_known_ones(
    data: dict[str, Any], where: str, near: str, known: str
) -> None:
    """A misspelt key at any depth is refused: where it is, what was meant, and what there is."""
    message = refused(data)
    assert message.startswith(f"{where}: unknown key; did you mean {near!r}? known keys: ")
    assert known in message


def test_no_error_shows_a_value_beside_it() -> None:
    """Ray logs tracebacks of what builds an application; a value may be a key."""
    for access in ({"admin_keys": "a-secret-key-000"}, {"admin_key": "a-secret-key-000", "x": 1}):
        with pytest.raises(ConfigError) as caught:
            parse_config({"models": [], "access": access})
        shown = "".join(traceback.format_exception(caught.value))
        assert "a-secret" not in shown


def test_a_key_of_another_level_is_told_where_it_belongs() -> None:
    message = refused(with_model(max_model_len=100))
    assert message.startswith("models.0.max_model_len: unknown key; did you mean 'engine.max_model")


def test_the_home_directory_is_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who opens files knows no ``~``."""
    monkeypatch.setenv("HOME", "/home/of/me")
    model = with_model(model="~/weights", statistics="~/statistics", chat_template="~/chat.jinja")
    config = parse_config({**model, "model_database": {"snapshot_dir": "~/database"}})
    assert config.model_database.snapshot_dir == Path("/home/of/me/database")
    (found,) = config.models
    assert (found.model, found.statistics) == ("/home/of/me/weights", "/home/of/me/statistics")
    assert found.chat_template == Path("/home/of/me/chat.jinja")
    given = parse_config(with_model(chat_template=Path("~/chat.jinja")))
    assert given.models[0].chat_template == Path("/home/of/me/chat.jinja")


def test_the_environment_may_name_files_of_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "serve.yaml").write_text("models: [{name: b, model: hdserve-tiny}]")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(CONFIG_ENVIRONMENT_VARIABLE, "~/serve.yaml")
    monkeypatch.setenv(API_KEYS_FILE_ENVIRONMENT_VARIABLE, "~/keys")
    monkeypatch.setenv(ADMIN_KEY_FILE_ENVIRONMENT_VARIABLE, "~/admin-key")
    config = load_config()
    assert config.models[0].name == "b"
    assert config.access.api_keys_file == tmp_path / "keys"
    assert config.access.admin_key_file == tmp_path / "admin-key"


@pytest.mark.parametrize("model", ["${MODEL}", "foo bar", "a/b/c", ""])
def test_what_names_no_model_is_refused(model: str) -> None:
    """No directory that is there, none that may be on another node, and none of the hub."""
    assert "models.0.model: " in refused(with_model(model=model))
    for other in ("/weights/of a model", "./a/b/c", "OWNER/a-model_1.5", "gpt2"):
        assert parse_config(with_model(model=other)).models[0].model == other


def test_a_strange_key_has_no_hint() -> None:
    """No guess is better than a wild one."""
    message = refused({**ONE_MODEL, "zzzzqqq": 1})
    assert message.startswith("zzzzqqq: unknown key; known keys: access, drain_timeout_s")


def test_every_mistake_is_named() -> None:
    """All wrong keys and values are reported at once, a line each."""
    data = with_model(engine={"max_num_sequences": 0, "dtype": "int3"}, num_cpus=-1)
    lines = refused({**data, "gateway": {"max_body_bytes": "much"}}).splitlines()
    assert {line.split(":")[0] for line in lines} == {
        "models.0.engine.max_num_sequences",
        "models.0.engine.dtype",
        "models.0.num_cpus",
        "gateway.max_body_bytes",
    }


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({}, "models: is missing"),
        ({"models": []}, "models: "),
        ({"models": [{"name": "", "model": "x"}]}, "models.0.name: "),
        ({"models": [{"name": "a#b", "model": "x"}]}, "no model called 'a#b'"),
        ({"models": [{"name": "a%2fb", "model": "x"}]}, "no model called 'a%2fb'"),
        ({"models": [{"name": "modèle", "model": "x"}]}, "no model called 'modèle'"),
        ({"models": [{"name": "a\nb", "model": "x"}]}, "no model called 'a\\nb'"),
        ({"models": [{"name": "a"}]}, "models.0.model: is missing"),
        ({"models": [*ONE_MODEL["models"]] * 2}, "models.1.name: two models are called 'a'"),
        (with_model(autoscaling={"max_replicas": "many"}), "models.0.autoscaling.max_replicas: "),
        (with_model(autoscaling={"min_replicas": 2}), "max_replicas is below min_replicas"),
        (with_model(autoscaling={"initial_replicas": 2}), "initial_replicas is not between"),
        (with_model(autoscaling={"policy": {"function": "a:b"}}), "did you mean 'policy_function'"),
        (with_model(aliases=["b", "b"]), "models.0.aliases.1: two models are called 'b'"),
        (with_model(aliases=["a"]), "two models are called 'a'"),
        (with_model(draft_from=["b"]), "models.0.draft_from.0: there is no model 'b'"),
        (with_model(draft_from=["b", "b"]), "models.0.draft_from.1: 'b' is named twice"),
        (
            with_model(num_replicas=1, autoscaling={"max_replicas": 2}),
            "models.0: num_replicas and autoscaling exclude each other",
        ),
        (
            with_model(drafting={"drafters": [{"name": "hierarchy"}, {"name": "hierarchy"}]}),
            "models.0.drafting: drafters names 'hierarchy' twice",
        ),
        *(
            (with_model(engine={key: 10**6 + 1}), f"models.0.engine.{key}: at most 1000000 is")
            for key in ("max_num_sequences", "max_num_queued")
        ),
        *(
            ({**ONE_MODEL, "gateway": {key: 2**31}}, f"gateway.{key}: at most 1000000 is")
            for key in ("max_ongoing_requests", "max_queued_requests")
        ),
    ],
)
def test_wrong_configurations_are_refused(data: dict[str, Any], reason: str) -> None:
    """What cannot be served is refused before anything starts, with the reason."""
    assert reason in refused(data)


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (with_model(engine={"max_num_sequences": True}), "models.0.engine.max_num_sequences"),
        (with_model(engine={"max_model_len": False}), "models.0.engine.max_model_len"),
        (with_model(num_cpus=True), "models.0.num_cpus"),
        (with_model(resources={"gpu_memory": True}), "models.0.resources.gpu_memory"),
        (with_model(autoscaling={"max_replicas": True}), "models.0.autoscaling.max_replicas"),
        (with_model(engine={"compile": 1}), "models.0.engine.compile"),
        (with_model(engine={"prefix_caching": 0}), "models.0.engine.prefix_caching"),
        ({**ONE_MODEL, "gateway": {"strict_requests": 1.0}}, "gateway.strict_requests"),
    ],
)
def test_true_is_no_number(data: dict[str, Any], where: str) -> None:
    """Nor the other way round: what was written is not what was meant."""
    assert refused(data).startswith(f"{where}: ")


def test_aliases_and_sources_are_accepted() -> None:
    """Several models may have aliases and draft from one another."""
    config = parse_config(
        {
            "models": [
                {
                    "name": "a",
                    "model": "x",
                    "aliases": ["gpt", "modèle#1"],
                    "draft_from": ["org/b: 2"],
                },
                {"name": "org/b: 2", "model": "y"},
            ]
        }
    )
    assert config.models[0].draft_from == ("org/b: 2",)


def test_configurations_are_frozen() -> None:
    """A running system's configuration does not change, at any depth."""
    config = parse_config(ONE_MODEL)
    with pytest.raises(ValidationError, match="frozen"):
        config.gateway = config.gateway  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        config.models[0].engine.dtype = "float32"  # type: ignore[misc]
    assert isinstance(config.models, tuple)


def test_a_file_is_read(tmp_path: Path) -> None:
    """YAML in UTF-8 becomes the configuration it spells."""
    path = tmp_path / "serve.yaml"
    path.write_text(
        "models:\n  - name: a\n    aliases: [Größe]\n    model: hdserve-tiny\n"
        "    engine: {dtype: float32}\n",
        encoding="utf-8",
    )
    engine = EngineConfig(dtype="float32")
    model = ModelConfig(name="a", aliases=("Größe",), model="hdserve-tiny", engine=engine)
    wanted = ServeConfig(models=(model,))
    assert load_config(path) == wanted
    assert load_config(str(path)) == wanted


def test_the_environment_names_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``HDSERVE_CONFIG`` counts when no path is given; empty or absent, the default is served."""
    path = tmp_path / "serve.yaml"
    path.write_text("models: [{name: b, model: hdserve-tiny}]")
    monkeypatch.setenv(CONFIG_ENVIRONMENT_VARIABLE, str(path))
    assert load_config().models[0].name == "b"
    other = tmp_path / "other.yaml"
    other.write_text("models: [{name: c, model: hdserve-tiny}]")
    assert load_config(other).models[0].name == "c"
    for unset in (lambda: monkeypatch.setenv(CONFIG_ENVIRONMENT_VARIABLE, ""), monkeypatch.undo):
        unset()
        assert load_config() == default_config()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"models: [", "cannot read the configuration"),
        (b"- a\n- b\n", "keys with values are expected"),
        (b"", "keys with values are expected"),
        (b"models: \xff\xfe", "cannot read the configuration"),
        (b"models: !!python/object/apply:os.system ['true']", "cannot read the configuration"),
        (b"modles: []", "modles: unknown key; did you mean 'models'?"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    """A file that is no configuration gives one error that names the file, and runs nothing."""
    path = tmp_path / "serve.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(path) in caught.value.message
    assert reason in caught.value.message


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """A path that is not there, or is a directory, is an error of the configuration."""
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match="cannot read the configuration"):
            load_config(path)


def test_the_default_serves_bundled_models() -> None:
    """Without any configuration every bundled model is served under its own name."""
    config = default_config()
    assert config.models[0].name == "hdserve-tiny"
    assert {model.model for model in config.models} >= set(bundled_models())
    assert all(model.name == model.model for model in config.models)


def test_the_environment_says_who_may_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It replaces what the configuration says, read from a file or handed over; reading a file
    alone does not look at it, and no key is shown."""
    written = {**ONE_MODEL, "access": {"api_keys_file": "keys", "admin_key": "written"}}
    found = load_config(written).access
    assert found.api_keys_file == Path("keys")
    assert found.admin_key is not None
    assert found.admin_key.get_secret_value() == "written"
    monkeypatch.setenv(API_KEYS_FILE_ENVIRONMENT_VARIABLE, "/run/keys")
    monkeypatch.setenv(ADMIN_KEY_ENVIRONMENT_VARIABLE, "of the environment")
    for access in (load_config(written).access, load_config(ONE_MODEL).access):
        assert access.api_keys_file == Path("/run/keys")
        assert access.admin_key is not None
        assert access.admin_key.get_secret_value() == "of the environment"
        assert "environment" not in repr(access)
    assert parse_config(written).access.api_keys_file == Path("keys")
    monkeypatch.setenv(ADMIN_KEY_FILE_ENVIRONMENT_VARIABLE, "/run/admin-key")
    assert load_config(written).access.admin_key_file is None
    monkeypatch.delenv(ADMIN_KEY_ENVIRONMENT_VARIABLE)
    access = load_config(written).access
    assert (access.admin_key_file, access.admin_key) == (Path("/run/admin-key"), None)


def test_there_is_one_administrator() -> None:
    """A key and a file at once would leave open which is meant."""
    with pytest.raises(ConfigError, match="admin_key or admin_key_file"):
        parse_config({**ONE_MODEL, "access": {"admin_key_file": "a", "admin_key": "b"}})


@pytest.mark.parametrize(
    ("weight_bytes", "wanted"), [(4_500_000, 2048), (300_000_000, 458), (988_000_000, 256)]
)
def test_chunks_of_prompts_are_larger_for_small_models_on_a_cpu(
    weight_bytes: int, wanted: int
) -> None:
    """Unless it is said how large they are."""
    assert EngineConfig().most_prefill_tokens(weight_bytes, "cpu") == wanted
    assert EngineConfig().most_prefill_tokens(weight_bytes, "cuda") == 256
    assert EngineConfig(prefill_chunk_tokens=7).most_prefill_tokens(weight_bytes, "cpu") == 7


def test_how_many_tokens_are_drafted_depends_on_the_device() -> None:
    """Unless it is said; none is a number, too."""
    default, none = DraftingConfig(), DraftingConfig(max_draft_tokens=0)
    assert (default.most_draft_tokens("cpu"), default.most_draft_tokens("cuda")) == (16, 31)
    assert (none.most_draft_tokens("cpu"), none.most_draft_tokens("cuda")) == (0, 0)


@pytest.mark.parametrize(
    ("device", "drafting", "is_refused"),
    [
        ("cpu", {"max_draft_tokens": 30}, False),
        ("cpu", {"max_draft_tokens": 31}, True),
        ("auto", {}, False),
        ("cuda", {}, True),
        ("cuda", {"drafters": []}, False),
    ],
)
def test_a_cache_holds_a_sequence_and_its_drafts(
    device: str, drafting: dict[str, Any], is_refused: bool
) -> None:
    """As many as there are by default on a GPU, too, where one is asked for."""
    data = with_model(engine={"device": device, "kv_cache_tokens": 32}, drafting=drafting)
    if is_refused:
        start = "models.0.engine.kv_cache_tokens: a KV cache of 32 tokens has no room for one draft"
        assert refused(data).startswith(start)
    else:
        assert parse_config(data).models[0].engine.kv_cache_tokens == 32


def test_paths_are_as_long_as_trees_allow() -> None:
    """Unless they are to be shorter."""
    assert DraftingConfig().most_depth(31) == 31
    assert [DraftingConfig(max_depth=8).most_depth(number) for number in (31, 4)] == [8, 4]


def test_an_empty_mapping_is_no_default() -> None:
    """A configuration that is handed over is the configuration."""
    with pytest.raises(ConfigError, match="models: is missing"):
        load_config({})


def test_a_misspelt_bundled_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a hub is asked for it; a directory of such a name is a directory."""
    config = {"models": [{"name": "a", "model": "hdserve-tinny"}]}
    with pytest.raises(ConfigError, match="hdserve-tinny: there are hdserve-mini, hdserve-tiny"):
        parse_config(config)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hdserve-tinny").mkdir()
    assert parse_config(config).models[0].model == "hdserve-tinny"
    assert parse_config({"models": [{"name": "a", "model": "hdserve-org/x"}]})
