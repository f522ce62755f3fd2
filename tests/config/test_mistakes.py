"""What is wrong with a configuration is said in the words of those who write one."""

from __future__ import annotations

from pathlib import Path

import pytest

from hdserve.config import ModelConfig, load_config
from hdserve.config.deployed import read_deployed_config
from hdserve.config.mistakes import ELSEWHERE
from hdserve.errors import ConfigError

MODEL = "models:\n  - name: a\n    model: hdserve-tiny\n"


TOO_LITTLE = "0, or at least 0.0001, is expected: Ray reserves no less"
NOT_CUSTOM = "is not a custom resource: Ray manages it itself"


def problems(path: Path, text: str) -> list[str]:
    """What a file with ``text`` is refused with, a line for each mistake."""
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    with pytest.raises(ConfigError, match=r"expected|missing|empty|key|custom|none"):
        read_deployed_config(path)
    first, *found = caught.value.message.splitlines()
    assert first == f"{path}:"
    return found


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ("model_database", "snapshot_interval_s"),
        ("model_database", "publish_interval_s"),
        ("model_database", "poll_interval_s"),
        ("gateway", "request_timeout_s"),
    ],
)
def test_what_never_ends(tmp_path: Path, section: str, name: str) -> None:
    """An interval without an end is none."""
    text = f"{MODEL}{section}:\n  {name}: .inf\ndrain_timeout_s: .inf\n"
    reason = "a finite number is expected, not inf"
    assert problems(tmp_path / "config.yaml", text) == [
        f"line 5, {section}.{name}: {reason}",
        f"line 6, drain_timeout_s: {reason}",
    ]


def test_an_empty_path_is_none(tmp_path: Path) -> None:
    """It would be the directory in which a process of Ray runs."""
    text = f"{MODEL}model_database:\n  snapshot_dir: ''\naccess:\n  api_keys_file: ''\n"
    assert problems(tmp_path / "config.yaml", text) == [
        "line 5, model_database.snapshot_dir: a path must not be empty",
        "line 7, access.api_keys_file: a path must not be empty",
    ]


def test_a_path_that_no_file_can_have(tmp_path: Path) -> None:
    text = f'{MODEL}access:\n  api_keys_file: "a\\0b"\n'
    assert problems(tmp_path / "config.yaml", text) == [
        "line 5, access.api_keys_file: a path must not have a NUL character",
    ]


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("num_replicas: many", "num_replicas: a whole number is expected, not 'many'"),
        ("num_replicas: 1.5", "num_replicas: a whole number is expected, not 1.5"),
        ("revision: ''", "revision: must not be empty"),
        ("statistics: ''", "statistics: must not be empty"),
        ("aliases: [b, '']", "aliases.1: must not be empty"),
        ("num_replicas: 0", "num_replicas: at least 1 is expected, not 0"),
        ("num_cpus: [1]", "num_cpus: a number is expected, not a list"),
        ("num_cpus: .inf", "num_cpus: a finite number is expected, not inf"),
        ("num_replicas: .inf", "num_replicas: a finite number is expected, not inf"),
        ("resources: {rack: .nan}", "resources.rack: a finite number is expected, not nan"),
        ("resources: {rack: -1.0}", "resources.rack: at least 0 is expected, not -1"),
        ("num_cpus: 0.00001", f"num_cpus: {TOO_LITTLE}"),
        ("num_gpus: 0.00001", f"num_gpus: {TOO_LITTLE}"),
        ("num_gpus: 2", "num_gpus: a replica runs on one GPU: 1, or a part of it, is expected"),
        ("resources: {rack: 0.00001}", f"resources.rack: {TOO_LITTLE}"),
        ("resources: {'': 1.0}", "resources: a custom resource has a name"),
        (
            "resources: {große: 1.0}",
            "resources: 'große' is not a name that Ray accepts: ASCII is expected",
        ),
        *(
            (f"resources: {{{name}: 1.0}}", f"resources: {name!r} {NOT_CUSTOM}")
            for name in ("CPU", "GPU", "memory", "object_store_memory", "bundle")
        ),
        ("resources: {rack: x}", "resources.rack: a number is expected, not 'x'"),
        ("aliases: b", "aliases: a list is expected, not 'b'"),
        ("engine: fast", "engine: a mapping is expected, not 'fast'"),
        ("autoscaling: true", "autoscaling: a mapping is expected, not true"),
        ("share_output: perhaps", "share_output: true or false is expected, not 'perhaps'"),
        ("chat_template: 7", "chat_template: a path is expected, not 7"),
        ("revision: 7", "revision: a text is expected, not 7; in quotes it is one"),
        (
            "tool_parser: xml",
            "tool_parser: auto, hermes, llama3_json, mistral, mistral_args, granite, deepseek_v3, "
            "deepseek_v31, harmony, qwen3_coder, glm, gemma or null is expected, not 'xml'",
        ),
        (
            "engine: {dtype: fp8}",
            "engine.dtype: auto, float32, bfloat16, float16 or float64 is expected, not 'fp8'",
        ),
        ("engine: {exact: maybe}", "engine.exact: true, false or auto is expected, not 'maybe'"),
        ("engine: {compile: 3}", "engine.compile: true, false or auto is expected, not 3"),
        (
            "engine: {prefill_slowdown: 1}",
            "engine.prefill_slowdown: more than 1 is expected, not 1",
        ),
        ("drafting: {max_depth: 999}", "drafting.max_depth: at most 256 is expected, not 999"),
        (
            "drafting: {drafters: [{name: 5}]}",
            "drafting.drafters.0.name: a text is expected, not 5",
        ),
    ],
)
def test_values(tmp_path: Path, key: str, reason: str) -> None:
    """Where it is, what is expected there, and what is there: one line."""
    (found,) = problems(tmp_path / "config.yaml", f"{MODEL}    {key}\n")
    assert found.startswith(f"line 4, models.0.{reason}")


@pytest.mark.parametrize("section", ["gateway", "model_database"])
@pytest.mark.parametrize(
    ("resources", "reason"),
    [
        ("{rack: x}", ".rack: a number is expected, not 'x'"),
        ("{rack: 0.00001}", f".rack: {TOO_LITTLE}"),
        ("{GPU: 1.0}", f": 'GPU' {NOT_CUSTOM}"),
    ],
)
def test_resources_of_other_processes(
    tmp_path: Path, section: str, resources: str, reason: str
) -> None:
    """As those of a model."""
    text = f"{MODEL}{section}: {{resources: {resources}}}\n"
    (found,) = problems(tmp_path / "config.yaml", text)
    assert found.startswith(f"line 4, {section}.resources{reason}")


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("max_num_seqs", "engine.max_num_sequences"),
        ("enforce-eager", "engine.compile"),
        ("speculative_config", "drafting"),
        ("override_generation_config", "defaults"),
        ("default-chat-template-kwargs", "defaults.chat_template_kwargs"),
        ("temperature", "defaults.temperature"),
    ],
)
def test_what_other_servers_call_a_key_is_told(tmp_path: Path, key: str, name: str) -> None:
    (found,) = problems(tmp_path / "config.yaml", f"{MODEL}    {key}: 8\n")
    assert f"unknown key; did you mean {name!r}? known keys:" in found


def test_each_key_of_another_server_has_one_here() -> None:
    for name in ELSEWHERE.values():
        *section, key = name.split(".")
        owner = ModelConfig.model_fields[section[0]].annotation if section else ModelConfig
        assert owner is not None
        assert key in owner.model_fields


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("models: []", "line 1, models: the list must not be empty"),
        ("gateway: {}", "models: is missing"),
        ("models:\n  - name: a", "line 2, models.0.model: is missing"),
        ("models:\n  - name: ''\n    model: x", "line 2, models.0.name: must not be empty"),
        ("models:\n  name: a\n  model: b", "line 1, models: a list is expected, not a mapping"),
        (f"{MODEL}telemetry: {{endpoint: 'a:1'}}", "line 4, telemetry.endpoint: an address that"),
        (
            f"{MODEL}gateway: {{allowed_origins: ['https://a.example/']}}",
            "line 4, gateway.allowed_origins: an origin without a path, as in",
        ),
        (
            f"{MODEL}gateway: {{allowed_origins: [a.example]}}",
            "line 4, gateway.allowed_origins: an origin without a path, as in",
        ),
        *(
            (
                f"{MODEL}gateway: {{allowed_hosts: ['{host}']}}",
                "line 4, gateway.allowed_hosts: a host name without scheme and port, as in",
            )
            for host in ("https://a.example", "a.example:80", "*.example", "a.example.", "")
        ),
    ],
)
def test_shapes(tmp_path: Path, text: str, reason: str) -> None:
    (found,) = problems(tmp_path / "config.yaml", text)
    assert found.startswith(reason)


def test_mistakes_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = f"drain_timeout_s: -1\n{MODEL}    num_gpus: x\n    num_cpus: y\n    engine: {{nme: 1}}\n"
    found = problems(tmp_path / "config.yaml", text)
    assert [line.split(":")[0] for line in found] == [
        "line 1, drain_timeout_s",
        "line 5, models.0.num_gpus",
        "line 6, models.0.num_cpus",
        "line 7, models.0.engine.nme",
    ]


def test_a_key_is_shown_to_nobody(tmp_path: Path) -> None:
    """Even where it is none because it was not quoted."""
    text = f"{MODEL}access: {{admin_key: 1234567890123456}}"
    (found,) = problems(tmp_path / "config.yaml", text)
    assert found == "line 4, access.admin_key: a text is expected; in quotes it is one"


def test_inside_of_a_serve_config_file(tmp_path: Path) -> None:
    """Lines are those of the file."""
    path = tmp_path / "serve.yaml"
    path.write_text(
        "applications:\n  - import_path: deployments:app\n    args:\n      config:\n"
        "        models:\n          - {name: a,\n             model: hdserve-tiny, num_cpus: x}\n"
    )
    with pytest.raises(ConfigError) as caught:
        read_deployed_config(path)
    assert caught.value.message.splitlines() == [
        f"{path}:",
        "applications.0.args.config:",
        "line 7, models.0.num_cpus: a number is expected, not 'x'",
    ]
