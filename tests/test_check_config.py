"""``hdserve check-config`` and ``config``, and the configurations that ship as examples."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from ray.serve.schema import ServeDeploySchema
from typer.testing import CliRunner

from hdserve.cli import main
from hdserve.cli.commands import app
from hdserve.config import load_config, read_config
from hdserve.config.deployed import read_deployed_config
from hdserve.errors import ConfigError
from hdserve.models import bundled_statistics

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples" / "configs").glob("*.yaml"))


def check(path: Path) -> Result:
    return CliRunner().invoke(app, ["check-config", str(path)])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_right(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every example is a configuration, down to the options and files it names."""
    monkeypatch.chdir(ROOT)
    result = check(path)
    assert result.exit_code == 0, result.exception
    assert result.stdout.endswith(": ok\n")
    assert "gateway" not in result.stderr
    for model in read_config(path).models:
        assert f"{model.name}: " in result.stdout


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff.yaml")
    path.write_text(MODEL % "")
    result = check(path)
    assert (result.exit_code, result.exception) == (0, None)
    assert result.stdout.endswith("\ufffd.yaml: ok\n")


def test_there_is_an_example_of_each_kind() -> None:
    names = {path.stem for path in EXAMPLES}
    assert names == {"one_model", "several_models", "namespaces", "gpu", "tools"}


MODEL = "models: [{name: a, model: hdserve-tiny%s}]\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            MODEL % ", num_replica: 2",
            "models.0.num_replica: unknown key; did you mean 'num_replicas'",
        ),
        (MODEL % "" + "gatway: {}", "gatway: unknown key; did you mean 'gateway'"),
        (MODEL % ", drafting: {drafters: [{name: hierarchie}]}", "unknown drafter 'hierarchie'"),
        (
            MODEL % ", drafting: {drafters: [{name: hierarchy, options: {frob: 1}}]}",
            "models.0.drafting.drafters: drafter hierarchy: frob: unknown key",
        ),
        (MODEL % ", tool_parser: xml", "models.0.tool_parser: "),
        (
            "models: [{name: a, model: /no/such/place}]",
            "line 1, models.0.model: there is no directory",
        ),
        (
            MODEL % ", chat_template: /no/such/file",
            "line 1, models.0.chat_template: cannot read the chat template /no/such/file",
        ),
        (
            MODEL % f", chat_template: {ROOT / 'k8s' / 'monitoring' / 'alerts.yaml'}",
            "alerts.yaml is not a chat template: unexpected char '$'",
        ),
        (
            MODEL % ", defaults: {chat_template_kwargs: {a: 1, tools: []}}",
            "line 1, models.0.defaults.chat_template_kwargs: tools is not a template variable",
        ),
        (
            MODEL % "" + "access: {api_keys_file: /no/such/file}",
            "line 2, access: cannot read the API keys",
        ),
        (
            MODEL % "" + "access: {admin_key: short}",
            "access.admin_key or HDSERVE_ADMIN_KEY: a key needs",
        ),
        ("models: [", "cannot read the configuration"),
        (MODEL % ", name: b", "the key 'name' is there twice"),
        (MODEL % ", draft_from: [a]", "line 1, models.0.draft_from.0: 'a' is the model itself"),
        (
            MODEL % ",\n  aliases: [a],\n  draft_from: [b, b]",
            "line 2, models.0.aliases.0: two models are called 'a'\n"
            "line 3, models.0.draft_from.0: there is no model 'b'\n"
            "line 3, models.0.draft_from.1: 'b' is named twice",
        ),
        (MODEL % ", engine: {max_num_sequences: true}", "max_num_sequences: a number"),
        (
            MODEL % ", engine: {max_model_len: 1000000}",
            "models.0.engine.max_model_len: the model takes 2048 tokens at most, not 1000000",
        ),
        (
            MODEL % ", engine: {kv_cache_tokens: 32}, drafting: {max_draft_tokens: 256}",
            "line 1, models.0.engine.kv_cache_tokens: a KV cache of 32 tokens has no room for one ",
        ),
        (
            MODEL % ", autoscaling: {policy: {policy_function: 'no.such:policy'}}",
            "models.0.autoscaling.policy.policy_function: no.such:policy cannot be imported: "
            "ModuleNotFoundError: No module named 'no'",
        ),
        (
            MODEL % ", autoscaling: {policy: {policy_function: 'json:policy'}}",
            "json:policy cannot be imported: AttributeError",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, reason: str) -> None:
    """Where it is and what was meant; the file comes first."""
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    error: Any = check(path).exception
    assert isinstance(error, ConfigError)
    assert reason in error.message
    assert str(path) in error.message.splitlines()[0]


@pytest.mark.parametrize("read", [read_config, read_deployed_config])
def test_what_can_be_read_once_has_lines(read: Callable[[Path], Any]) -> None:
    """A pipe, which is empty the second time, as in ``check-config <(...)``."""
    reader, writer = os.pipe()
    os.write(writer, (MODEL % "" + "gatway: {}").encode())
    os.close(writer)
    try:
        with pytest.raises(ConfigError, match="line 2, gatway: unknown key"):
            read(Path(f"/dev/fd/{reader}"))
    finally:
        os.close(reader)


def test_lines_within_a_serve_config_file(tmp_path: Path) -> None:
    """Of what only the parts can tell, too; none of a file that the file names."""
    path, inner = tmp_path / "serve.yaml", tmp_path / "inner.yaml"
    head = "applications:\n- import_path: deployments:app\n  args:\n    config:"
    inner.write_text("models: [{name: a, model: ./nothing}]")
    for config, place in (
        ("\n      models:\n      - name: a\n        model: ./nothing", "line 7, models.0.model"),
        (f" {inner}", "models.0.model"),
    ):
        path.write_text(head + config)
        error: Any = check(path).exception
        missing = Path("nothing").absolute()  # what is relative begins here, not at the file
        assert f"\n{place}: there is no directory {missing}" in error.message


def test_what_a_manifest_names_may_be_in_its_pods(tmp_path: Path) -> None:
    """What is not here is told; other mistakes are mistakes."""
    path = tmp_path / "rendered.yaml"
    config: dict[str, Any] = {
        "models": [{"name": "a", "model": "/no/model", "chat_template": "/no/template"}],
        "access": {"api_keys_file": "/no/keys"},
    }

    def checked() -> Result:
        application = {"import_path": "deployments:app", "args": {"config": config}}
        spec = {"serveConfigV2": yaml.safe_dump({"applications": [application]})}
        path.write_text(yaml.safe_dump({"kind": "RayService", "spec": spec}))
        return check(path)

    told = checked()
    assert told.exit_code == 0, told.exception
    for place, missing in (
        ("access", "/no/keys"),
        ("models.0.model", "/no/model"),
        ("models.0.chat_template", "/no/template"),
    ):
        (line,) = (line for line in told.stderr.splitlines() if missing in line)
        assert line.startswith(f"warning: {place}: ")
        assert line.endswith("; this does not matter if it is in the pods")
    config["models"][0]["drafting"] = {"drafters": [{"name": "hierarchie"}]}
    config["access"]["admin_key"] = "short"
    error: Any = checked().exception
    assert "unknown drafter 'hierarchie'" in error.message
    assert "needs at least 16 characters" in error.message
    assert "/no/" not in error.message
    (tmp_path / "keys").write_text("short")
    config["access"] = {"api_keys_file": str(tmp_path / "keys")}
    error = checked().exception
    assert f"access: {tmp_path / 'keys'}" in error.message


def test_a_policy_beside_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``serve run`` finds it in the directory it is run in."""
    path = tmp_path / "serve.yaml"
    path.write_text(MODEL % ", autoscaling: {policy: {policy_function: 'own_policy:policy'}}")
    (tmp_path / "own_policy.py").write_text("def policy(context): ...")
    assert isinstance(check(path).exception, ConfigError)
    monkeypatch.chdir(tmp_path)
    assert check(path).exit_code == 0


def stretched(kind: str, factor: float) -> str:
    """A configuration of 50 tokens, as the card of a model says how to make it longer."""
    rope = {"type": kind, "factor": factor, "original_max_position_embeddings": 50}
    return json.dumps({"max_position_embeddings": 50, "rope_scaling": rope})


def test_the_context_of_a_model_is_known_without_its_weights(tmp_path: Path) -> None:
    """From its directory; where nothing says it, nothing is checked."""
    path, model = tmp_path / "serve.yaml", tmp_path / "model"
    model.mkdir()
    path.write_text(f"models: [{{name: a, model: {model}, engine: {{max_model_len: 100}}}}]")
    for content, status in (
        ("{}", 0),
        ("[", 0),
        ('{"max_position_embeddings": 100}', 0),
        ('{"max_position_embeddings": 99}', 1),
        ('{"text_config": {"max_position_embeddings": 99}}', 1),
        (stretched("yarn", 2.0), 0),
        (stretched("yarn", 1.9), 1),
        (stretched("dynamic", 2.0), 1),
        (stretched("yarn", math.inf), 0),
    ):
        (model / "config.json").write_text(content)
        assert check(path).exit_code == status


def test_a_directory_that_is_not_there_yet_is_told(tmp_path: Path) -> None:
    """It may be on the nodes that serve."""
    path = tmp_path / "serve.yaml"
    path.write_text(MODEL % ", statistics: /no/where")
    result = check(path)
    assert result.exit_code == 0
    assert result.stderr.startswith(
        "warning: line 1, models.0.statistics: there is no directory /no/where"
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({}, ""),
        ({"tokenizer": "0" * 64}, "{} was made with another tokenizer; without it"),
        ({"format_version": 99}, "{}/info.json: has format 99, newer than"),
        (None, "{}: no statistics database"),
    ],
)
def test_statistics_that_would_not_be_used_are_told(
    tmp_path: Path, content: dict[str, Any] | None, reason: str
) -> None:
    """The model is served without them; of a tokenizer that is not here nothing is said."""
    path, statistics = tmp_path / "serve.yaml", tmp_path / "statistics"
    statistics.mkdir()
    if content is not None:
        info = json.loads((bundled_statistics()[0] / "info.json").read_text())
        (statistics / "info.json").write_text(json.dumps(info | content))
    path.write_text(MODEL % f", statistics: {statistics}")
    told = check(path)
    assert told.exit_code == 0
    place = "warning: line 1, models.0.statistics: "
    assert told.stderr.startswith(place + reason.format(statistics) if reason else "")
    assert bool(told.stderr) == bool(reason)
    path.write_text(f"models: [{{name: a, model: owner/model, statistics: {statistics}}}]")
    assert "another tokenizer" not in check(path).stderr


def test_models_that_never_have_anything_to_draft_from(tmp_path: Path) -> None:
    """They keep what they generate to themselves, or nothing is shared at all."""
    path = tmp_path / "serve.yaml"
    models = MODEL % ", draft_from: [b]}, {name: b, model: hdserve-tiny%s"
    path.write_text(models % "")
    assert check(path).stderr == ""
    path.write_text(models % ", share_output: false")
    reason = "b has share_output: false, so there is nothing to draft from"
    assert check(path).stderr == f"warning: line 1, models.0.draft_from: {reason}\n"
    path.write_text(models % "" + "model_database: {is_enabled: false}")
    reason = "model_database is off, so nothing of other models can be drafted from"
    assert check(path).stderr == f"warning: line 1, models.0.draft_from: {reason}\n"


def test_files_of_keys_that_are_doubtful(tmp_path: Path) -> None:
    """They are named, and the configuration is right all the same."""
    keys, admin, path = tmp_path / "keys", tmp_path / "admin", tmp_path / "serve.yaml"
    keys.write_text("a-key-of-sixteen-characters\n")
    keys.chmod(0o640)
    path.write_text(MODEL % "" + f"access: {{api_keys_file: {keys}, admin_key_file: {admin}}}")

    def warnings() -> list[str]:
        result = CliRunner().invoke(app, ["check-config", str(path), "--json"])
        assert result.exit_code == 0
        found: list[str] = json.loads(result.stdout)["warnings"]
        text = check(path)
        assert text.exit_code == 0
        assert text.stdout.endswith(": ok\n")
        assert text.stderr.splitlines() == [f"warning: {warning}" for warning in found]
        return found

    (missing,) = warnings()
    assert missing.startswith(f"access.admin_key_file: there is no file {admin}")
    admin.write_text("the-key-of-the-administrator\n")
    admin.chmod(0o600)
    assert warnings() == []
    for file in (keys, admin):
        file.chmod(0o644)
    assert [warning.partition(":")[0] for warning in warnings()] == [
        "access.api_keys_file",
        "access.admin_key_file",
    ]


@pytest.mark.parametrize(("num_ongoing", "is_told"), [(81, False), (80, True)])
def test_gateways_that_are_full_before_the_replicas(
    tmp_path: Path, num_ongoing: int, is_told: bool
) -> None:
    """What a replica should refuse would wait, and the probes with it; all replicas that there may
    be count."""
    engine = "engine: {max_num_sequences: 4, max_num_queued: 6}"
    scaling = "autoscaling: {min_replicas: 0, max_replicas: 15}"
    models = MODEL % f", {engine}, {scaling}}}, {{name: b, model: hdserve-tiny, {engine}"
    path = tmp_path / "serve.yaml"
    path.write_text(f"{models}gateway: {{num_replicas: 2, max_ongoing_requests: {num_ongoing}}}")
    told = check(path)
    assert told.exit_code == 0
    start = "warning: line 2, gateway.max_ongoing_requests: all gateways together take 160 "
    assert told.stderr.startswith(start if is_told else "")
    assert bool(told.stderr) == is_told
    assert ("the replicas decode and queue 160: " in told.stderr) == is_told
    assert ("; 81 each, and some more, are expected" in told.stderr) == is_told


def test_gateways_that_cannot_be_as_large_as_the_replicas(tmp_path: Path) -> None:
    """No number that would be refused is proposed."""
    path = tmp_path / "serve.yaml"
    path.write_text(MODEL % ", num_replicas: 3, engine: {max_num_queued: 1000000}")
    told = check(path)
    assert told.exit_code == 0
    assert told.stderr.startswith("warning: gateway.max_ongoing_requests: all gateways together ")
    assert told.stderr.endswith("; a smaller engine.max_num_queued is expected\n")


@pytest.mark.parametrize(
    ("device", "num_gpus", "is_told"),
    [
        ("cuda", 0, True),
        ("cuda", 0.5, False),
        ("cuda", "null", False),
        ("auto", 0, False),
        ("cpu", 0, False),
    ],
)
def test_a_gpu_that_no_replica_has(
    tmp_path: Path, device: str, num_gpus: float | str, is_told: bool
) -> None:
    """Commands without Ray take the one that is there, so it is only a warning."""
    path = tmp_path / "serve.yaml"
    path.write_text(MODEL % f", num_gpus: {num_gpus}, engine: {{device: {device}}}")
    told = check(path)
    assert told.exit_code == 0
    start = "warning: line 1, models.0.engine.device: a replica sees no GPU with num_gpus: 0"
    assert told.stderr.startswith(start if is_told else "")
    assert bool(told.stderr) == is_told


def test_json_names_models_and_problems(tmp_path: Path) -> None:
    """With the status of the text."""
    right, wrong = tmp_path / "right.yaml", tmp_path / "wrong.yaml"
    right.write_text(MODEL % ", num_replicas: 2")
    wrong.write_text(MODEL % "" + "gatway: {}")
    result = CliRunner().invoke(app, ["check-config", str(right), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["models"] == [
        {"name": "a", "model": "bundled model", "size": "2 replicas"}
    ]
    result = CliRunner().invoke(app, ["check-config", str(wrong), "--json"])
    assert result.exit_code == 2
    found = json.loads(result.stdout)
    assert not found["ok"]
    assert "did you mean 'gateway'" in found["problems"][-1]


def show(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["config", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return yaml.safe_load(result.stdout)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_what_deploys_a_configuration(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Serve takes it, and the application is given the same configuration."""
    monkeypatch.chdir(ROOT)
    deploy = show("--serve-yaml", "--config", str(path))
    (application,) = ServeDeploySchema.model_validate(deploy).applications
    assert application.import_path == "deployments:app"
    wanted = read_config(path).model_dump(exclude={"access": {"admin_key"}})
    found = load_config(application.args["config"]).model_dump(exclude={"access": {"admin_key"}})
    assert found == wanted


def test_what_deploys_it_elsewhere_names_relative_paths(tmp_path: Path) -> None:
    """They begin where Ray is started there, which need not be here; the output is as before."""
    path = tmp_path / "serve.yaml"
    path.write_text(MODEL % ", statistics: counted" + "model_database: {snapshot_dir: /kept}")
    for arguments in (("--serve-yaml",), ("--serve-yaml", "--json")):
        result = CliRunner().invoke(app, ["config", "--config", str(path), *arguments])
        assert result.stderr == (
            "warning: models.0.statistics: counted is relative: it begins in the directory of "
            "`ray start`, not of this command\n"
        )
        assert yaml.safe_load(result.stdout)["applications"]
    assert CliRunner().invoke(app, ["config", "--config", str(path)]).stderr == ""


def test_the_whole_configuration_without_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every default is shown, no secret is; what is printed is a configuration again."""
    secret = "the-key-of-the-administrator"
    path = tmp_path / "serve.yaml"
    path.write_text(MODEL % "" + f"access: {{admin_key: {secret}}}")
    for arguments in (("--json",), ("--serve-yaml",), ()):
        result = CliRunner().invoke(app, ["config", "--config", str(path), *arguments])
        assert secret not in result.output
    shown = tmp_path / "shown.yaml"
    shown.write_text(result.stdout)
    assert read_config(shown).models == read_config(path).models
    monkeypatch.setenv("HDSERVE_CONFIG", str(path))
    assert show()["gateway"]["num_replicas"] == 1


def test_errors_are_told_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Brackets in a name, or in the packages to install, are no markup."""
    for name in ("a[/b].yaml", "hdserve[tracing].yaml"):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", ["hdserve", "check-config", name])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 2
        assert name in capsys.readouterr().err


@pytest.mark.parametrize("output", ["full", "closed"])
def test_a_place_that_takes_nothing_is_told(output: str, tmp_path: Path) -> None:
    """In a line, without the way through the code; what nobody wants to hear is no fault."""
    command = [sys.executable, "-c", "from hdserve.cli import main; main()", "config"]
    where = "/dev/full" if output == "full" else "/dev/null"
    with open(where, "w") as taker:
        close = (lambda: os.close(1)) if output == "closed" else None
        done = subprocess.run(
            command, stdout=taker, stderr=subprocess.PIPE, text=True, cwd=ROOT, preexec_fn=close
        )
    wanted = "hdserve: cannot write: [Errno 28] No space left on device\n"
    assert (done.returncode, done.stderr) == ((2, wanted) if output == "full" else (0, ""))


def test_help_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines do not end where those of the code do."""
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    told = CliRunner().invoke(app, ["generate", "--help"]).stdout
    assert (
        " from earlier ones: as text one after the other" in told
    )  # lines of the code end in between
