"""``hdserve check-lossless``: check on this machine whether drafts change any token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hdserve.bench.environment import commit, cpu_name
from hdserve.bench.replay_setup import drafting_in, only
from hdserve.cli.file_names import shown_name
from hdserve.cli.interruption import how_to_go_on, interruptible
from hdserve.cli.json_option import JobJson, JsonOutput
from hdserve.cli.model_option import (
    CONFIG_HELP,
    Model,
    chosen_model,
    given,
    model_of,
    with_options,
)
from hdserve.cli.options import AnswerTokens, Exact, Limit, OneDrafter, Prompts, takes
from hdserve.cli.progress import progress
from hdserve.config import ModelConfig
from hdserve.config.deployed import deployed_config
from hdserve.config.strict_yaml import load_documents, read_yaml
from hdserve.drafting.registry import check_drafters
from hdserve.journal import Journal, file_digest
from hdserve.prompts import PromptRow, read_prompts, rows_digest

if TYPE_CHECKING:
    from hdserve.bench.lossless import SettingResult
    from hdserve.engine.host import ModelHost


_KEYS_OF_SERVER = frozenset({"models", "applications", "kind"})
"""Each file with a server's configuration has one of these keys."""

_HOW_TO_BE_EXACT = (
    "Rounding turned near-ties; with `engine: {exact: true}` (here --exact) it does not."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LosslessOptions:
    """What is compared, and how it is decoded."""

    prompts: Prompts
    model: Model = None
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16, float16, float64 or auto.",
            show_default="that of --config, else auto",
        ),
    ] = None
    max_tokens: AnswerTokens = 128
    batch_size: Annotated[int, typer.Option(help="Sequences decoded together.", min=1)] = 1
    limit: Limit = None
    exact: Exact = None
    num_threads: Annotated[
        int | None,
        typer.Option(
            help="`engine.num_threads` of the configuration; which forwards are exact may depend "
            "on it.",
            show_default="that of --config, else all cores",
            min=1,
        ),
    ] = None
    drafter: OneDrafter = None
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"{CONFIG_HELP} Or YAML with a `drafting` section only."),
    ] = None
    json_path: JobJson = None


@takes(LosslessOptions)
def check_lossless(options: LosslessOptions) -> None:
    """Compare drafted with plain output, token for token, greedy and sampled.

    Each prompt is decoded plainly, with cold databases, and again with the databases that pass
    filled.  With the --config of a server, the model is checked as it is served.  Exits with 1 when
    a single token differs, or when nothing was accepted.  An interrupted job goes on with the plain
    or drafted half it has not ended when the same command is run again.
    """
    output = JsonOutput(options.json_path)
    with interruptible(how_to_go_on(output.lasting_file)):
        from hdserve.engine.host import ModelHost  # takes seconds

        model = _model(options)
        check_drafters(model.drafting)
        rows = read_prompts(options.prompts, options.limit)
        host = ModelHost(model)
        settings = _settings(options, model, rows, host)
        whole = settings | {
            "configuration": model.model_dump(mode="json"),
            "chat_template": file_digest(model.chat_template),
            "is_exact": host.make_engine().is_exact,  # may depend on what this machine measures
        }
        journal = Journal(output.lasting_file, whole)
        results = _run(options, rows, host, journal)
    for result in results if output.has_text else ():
        typer.echo(
            f"{result.setting} identical {result.identical}/{result.total}"
            f"  ({result.dtype}, {'exact' if result.is_exact else 'not exact'};"
            f" {result.draft_tokens} drafted, {result.accepted_tokens} accepted;"
            f" {result.num_cut_prompts} prompts cut to fit)"
        )
        for difference in result.first_differences:
            typer.echo(f"  {difference}")
    have_differed = any(r.identical < r.total and not r.is_exact for r in results)
    if output.has_text and have_differed:
        typer.echo(_HOW_TO_BE_EXACT)
    shown = {"model": model.name, "drafters": [each.name for each in model.drafting.drafters]}
    found = {"settings": settings, "results": [*map(asdict, results)]}
    output.write(shown | found)
    journal.finish()
    for result in results:
        if not result.accepted_tokens:
            typer.echo(
                f"{result.setting}: nothing was accepted, so nothing was checked; longer answers "
                "say more",
                err=True,
            )
    if not all(result.is_lossless for result in results):
        raise typer.Exit(1)


def _model(options: LosslessOptions) -> ModelConfig:
    """Return the model with the settings that it is checked with.

    Raises:
        ConfigError: the configuration cannot be read, or it or an option is wrong.
    """
    model = _configured(options.model, options.config)
    engine = given(
        dtype=options.dtype,
        exact=options.exact,
        num_threads=options.num_threads,
        max_num_sequences=options.batch_size,
        compile=_would_be_compiled(model) or None,
    )
    model = with_options(model, engine=engine)
    return model.model_copy(update={"drafting": only(options.drafter, model.drafting)})


def _configured(model: str | None, config: Path | None) -> ModelConfig:
    """Return a model of a server's configuration, or with the drafting of a file without models."""
    if config is None:
        return chosen_model(model, None)
    documents, text = read_yaml(config, load_documents)
    if any(isinstance(item, dict) and _KEYS_OF_SERVER & item.keys() for item in documents):
        return model_of(deployed_config(config, documents, text).config, config, model)
    drafting = drafting_in(config, documents[0] if len(documents) == 1 else documents)
    return chosen_model(model, None).model_copy(update={"drafting": drafting})


def _would_be_compiled(model: ModelConfig) -> bool:
    """Whether a server would compile the model."""
    from hdserve.engine.forward.compiled import can_compile

    return model.engine.compile == "auto" and can_compile()


def _run(
    options: LosslessOptions, rows: Sequence[PromptRow], host: ModelHost, journal: Journal
) -> list[SettingResult]:
    """Check the model, with a progress bar."""
    from hdserve.bench.engine_setup import encoded_prompts
    from hdserve.bench.lossless import SETTINGS, LosslessCheck

    encoded = list(encoded_prompts(rows, host, options.max_tokens))
    with progress("decoding", len(SETTINGS) * 3 * len(encoded)) as bar:
        check = LosslessCheck(
            host,
            encoded,
            options.max_tokens,
            batch_size=options.batch_size,
            journal=journal,
            progress=bar.advance,
        )
        return check.run()


def _settings(
    options: LosslessOptions, model: ModelConfig, rows: Sequence[PromptRow], host: ModelHost
) -> dict[str, Any]:
    """Return the settings that are written with the results."""
    return {
        "model": model.model,
        "config": options.config and shown_name(options.config),
        "prompts": shown_name(options.prompts),
        "digest": rows_digest(rows),
        "limit": options.limit,
        "dtype": str(host.model.dtype).removeprefix("torch."),
        "exact": model.engine.exact,
        "compile": model.engine.compile,
        "max_tokens": options.max_tokens,
        "batch_size": options.batch_size,
        "hardware": cpu_name() if host.device_name == "cpu" else host.device_name,
        "num_threads": host.num_threads,
        "commit": commit(),
    }
