"""``hdserve check-lossless``: what it counts, and that an interrupted job goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from typer.testing import CliRunner

from hdserve.bench.lossless import LosslessCheck, SettingResult, _gap
from hdserve.bench.prompts import encode_prompt
from hdserve.cli import EXIT_INTERRUPTED, lossless
from hdserve.cli.commands import app
from hdserve.cli.lossless import LosslessOptions, _model
from hdserve.config import ModelConfig
from hdserve.engine.forward import compiled
from hdserve.engine.host import ModelHost
from hdserve.errors import ConfigError, HdserveError
from hdserve.journal import Journal
from hdserve.prompts import PromptRow
from tests.engines import make_engine
from tests.interruption import interrupt_after, units
from tests.models import make_model
from tests.trials import shared_trials

TEXTS = ("I want to book a table for two.", "A taxi to the station, please.", "Any trains?")
NUM_SEQUENCES = 2 * 3 * len(TEXTS)
UNITS = ["greedy, plain", "greedy, drafted", "sampled, plain", "sampled, drafted"]


@pytest.fixture(scope="module", autouse=True)
def trials() -> Iterator[None]:
    """Many tests make an engine; what it tries out is tested elsewhere."""
    with shared_trials():
        yield


@pytest.fixture(scope="module")
def host() -> ModelHost:
    """One whose drafts do not follow the time a forward takes, so that all counts repeat."""
    options: dict[str, Any] = {
        "engine": {"dtype": "float32", "exact": True, "max_num_sequences": 2},
        "drafting": {"adapts_budget": False},
    }
    return ModelHost(ModelConfig(name="m", model="hdserve-mini", **options))


def check(host: ModelHost, path: Path | None, stops_after: int | None = None) -> Any:
    """The results; it is interrupted when ``stops_after`` sequences have ended."""
    num_ended = 0

    def note(num: int) -> None:
        nonlocal num_ended
        before, num_ended = num_ended, num_ended + num
        if stops_after is not None and before < stops_after <= num_ended:
            raise KeyboardInterrupt

    encoded = [encode_prompt(PromptRow(text, "all", text), host.tokenizer, 512) for text in TEXTS]
    job = LosslessCheck(
        host, encoded, 16, batch_size=2, journal=Journal(path, {"a": 1}), progress=note
    )
    results = job.run()
    assert num_ended == NUM_SEQUENCES
    return results


@pytest.mark.slow
def test_interrupted_anywhere_it_counts_the_same(host: ModelHost, tmp_path: Path) -> None:
    """Tokens, drafts and where they came from: all is as in a job that was not interrupted."""
    wanted: list[SettingResult] = check(host, None)
    assert [result.setting for result in wanted] == ["greedy", "sampled"]
    for result in wanted:
        assert (result.identical, result.total, result.is_lossless) == (3, 3, True)
        assert result.accepted_by_source["model"] > 0
    for stops_after in (5, 8, 14):  # in the first drafted pass, the second, and of other sampling
        path = tmp_path / f"{stops_after}"
        with pytest.raises(KeyboardInterrupt):
            check(host, path, stops_after)
        kept = units(path.with_suffix(".unfinished"))
        assert list(kept) == UNITS[: len(kept)]
        assert check(host, path) == wanted


def test_a_kept_difference_is_reported(host: ModelHost, tmp_path: Path) -> None:
    """Plain output that was kept is what drafted output is compared with, also when it differs."""
    path = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        check(host, path, len(TEXTS) + 1)
    journal = path.with_suffix(".unfinished")
    (kept,) = units(journal).values()
    changed = [[*kept[0][:-1], kept[0][-1] ^ 1], *kept[1:]]
    journal.write_text(journal.read_text().replace(json.dumps(kept), json.dumps(changed)))
    greedy, sampled = check(host, path)
    assert (greedy.identical, sampled.identical) == (2, 3)
    assert not greedy.is_lossless
    cold, filled = greedy.first_differences
    assert (cold.prompt, cold.databases, filled.databases) == (TEXTS[0], "cold", "filled")
    assert cold.position == len(kept[0]) - 1
    assert (cold.plain_token, cold.drafted_token) == (changed[0][-1], kept[0][-1])


def test_what_fails_both_times_is_not_identical() -> None:
    """Two answers that are cut short by an error say nothing."""
    config = {"name": "m", "model": "hdserve-mini", "engine": {"compile": False}}
    own = ModelHost(ModelConfig.model_validate(config))
    poison = own.tokenizer.encode(TEXTS[0])[-1]
    cast("Any", own.model.module).get_input_embeddings().weight.data[poison] = float("nan")
    with pytest.raises(HdserveError):
        check(own, None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_the_command_goes_on(tmp_path: Path) -> None:
    """After a real Ctrl-C, and with the exit code of the whole."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in TEXTS * 2))
    command = ["check-lossless", "--prompts", str(prompts), "--model", "hdserve-mini"]
    command += ["--exact", "--json", str(out), "--batch-size", "2", "--max-tokens"]
    journal = tmp_path / "out.json.unfinished"
    told = interrupt_after(1, journal, *command, "24")
    assert "interrupted; the same command keeps what was finished" in told
    assert 1 <= len(units(journal)) < len(UNITS)
    with pytest.raises(ConfigError, match="max_tokens was 24, is 9"):
        CliRunner().invoke(app, [*command, "9"], catch_exceptions=False)
    result = CliRunner().invoke(app, [*command, "24"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "greedy identical 6/6" in result.stdout
    assert not journal.exists()
    found = json.loads(out.read_text())["results"]
    assert [(row["identical"], row["total"]) for row in found] == [(6, 6), (6, 6)]


def test_the_drafter_that_is_named_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the options of a configuration, and no other drafts; an unknown one is told before a
    model is loaded."""
    prompts, out, config = (tmp_path / name for name in ("prompts.jsonl", "out.json", "c.yaml"))
    prompts.write_text(json.dumps({"turns": [TEXTS[0]]}) + "\n")
    drafter = "{name: prompt-lookup, options: {max_draft_tokens: 1}}"
    config.write_text(f"drafting: {{drafters: [{drafter}]}}")
    command = ["check-lossless", "--prompts", str(prompts), "--drafter"]
    with pytest.raises(ConfigError, match="unknown drafter 'contxt'"):
        CliRunner().invoke(app, [*command, "contxt", "--model", "/no"], catch_exceptions=False)
    monkeypatch.setattr(compiled, "can_compile", lambda: False)
    command += ["prompt-lookup", "--config", str(config), "--json", str(out)]
    command += ["--model", "hdserve-mini", "--exact", "--max-tokens", "48"]
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
    found = json.loads(out.read_text())
    assert found["drafters"] == ["prompt-lookup"]
    for row in found["results"]:
        assert set(row["accepted_by_source"]) == {"context"}
        assert 0 < row["draft_tokens"] <= 2 * 48


def test_a_model_is_checked_as_it_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the settings of a server's configuration, except for those that are given; the result
    says with which."""
    prompts, out, config = (tmp_path / name for name in ("prompts.jsonl", "out.json", "c.yaml"))
    prompts.write_text(json.dumps({"turns": [TEXTS[0]]}) + "\n")
    model = {
        "name": "served",
        "model": "hdserve-mini",
        "num_cpus": 1,
        "engine": {"dtype": "float32", "exact": True, "compile": False, "kv_cache_tokens": 4096},
        "drafting": {"drafters": [{"name": "prompt-lookup"}], "max_draft_tokens": 3},
    }
    config.write_text(json.dumps({"models": [{"name": "a", "model": "hdserve-tiny"}, model]}))
    command = ["check-lossless", "--prompts", str(prompts), "--config", str(config)]
    command += ["--model", "served", "--max-tokens", "48", "--json", str(out)]
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
    found = json.loads(out.read_text())
    assert (found["model"], found["drafters"]) == ("served", ["prompt-lookup"])
    wanted = {"model": "hdserve-mini", "config": "c.yaml", "prompts": "prompts.jsonl"}
    wanted |= {"dtype": "float32", "exact": True, "compile": False, "num_threads": 1}
    wanted |= {"max_tokens": 48, "batch_size": 1, "limit": None}
    assert wanted.items() <= found["settings"].items()
    assert {row["is_exact"] for row in found["results"]} == {True}
    monkeypatch.setattr(compiled, "can_compile", lambda: False)
    options = LosslessOptions(
        prompts=prompts, config=config, model="served", dtype="bfloat16", num_threads=2, exact=False
    )
    engine = _model(options).engine
    assert (engine.dtype, engine.num_threads, engine.exact) == ("bfloat16", 2, False)
    assert engine.kv_cache_tokens == 4096


@pytest.mark.parametrize(("compile_", "is_compiled"), [("auto", True), (False, False)])
def test_a_model_is_compiled_as_it_is_served(
    compile_: object, is_compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a server would; from the first answer on."""
    config = tmp_path / "c.yaml"
    model = {"name": "m", "model": "hdserve-mini", "engine": {"compile": compile_}}
    config.write_text(json.dumps({"models": [model]}))
    monkeypatch.setattr(compiled, "can_compile", lambda: True)
    assert _model(LosslessOptions(prompts=config, config=config)).engine.compile is is_compiled


def test_a_configuration_may_come_through_a_pipe(tmp_path: Path) -> None:
    """As in ``--config <(...)``: it is empty the second time."""
    reading, writing = os.pipe()
    model = {"name": "m", "model": "hdserve-mini", "engine": {"kv_cache_tokens": 4096}}
    os.write(writing, json.dumps({"models": [model]}).encode())
    os.close(writing)
    try:
        found = _model(LosslessOptions(prompts=tmp_path, config=Path(f"/dev/fd/{reading}")))
    finally:
        os.close(reading)
    assert (found.name, found.engine.kv_cache_tokens) == ("m", 4096)


def test_a_job_with_another_chat_template_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the file of the template is the same."""
    names = ("prompts.jsonl", "out.json", "c.yaml", "chat.jinja")
    prompts, out, config, template = (tmp_path / name for name in names)
    prompts.write_text(json.dumps({"turns": [TEXTS[0]]}) + "\n")
    model = {"name": "m", "model": "hdserve-mini", "chat_template": str(template)}
    config.write_text(json.dumps({"models": [model | {"engine": {"compile": False}}]}))
    command = ["check-lossless", "--prompts", str(prompts), "--config", str(config)]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def settings(text: str) -> Any:
        template.write_text(text)
        result = CliRunner().invoke(app, [*command, "--json", str(out)], catch_exceptions=False)
        assert result.exit_code == EXIT_INTERRUPTED
        (line, *_) = (tmp_path / "out.json.unfinished").read_text().splitlines()
        return json.loads(line)["settings"]

    monkeypatch.setattr(lossless, "_run", interrupted)
    first = settings("{{ messages[0].content }}")
    assert settings("{{ messages[0].content }}") == first
    assert settings("{{ messages[0].content }}!") != first


def test_the_gap_of_two_tokens() -> None:
    """As the model has it; where it gives no numbers there is none, and looking for it ends."""
    model = make_model()
    with torch.no_grad():
        logits = model(torch.tensor([[5, 7]])).logits[0, -1]
    first, second = logits.topk(2).indices.tolist()
    engine = make_engine(model=model, max_draft_tokens=0)
    wanted = float(logits[first] - logits[second])
    assert wanted > 0.01
    assert _gap(engine, [5, 7], [second, first]) == pytest.approx(wanted, abs=1e-4)
    assert _gap(engine, [5, 7], [first, int(logits.argmin())]) is None
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = float("nan")
    assert _gap(engine, [5, 7], [1, 2]) is None
