"""``hdserve check-lossless``: check on this machine whether drafts change any token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hdserve.bench.environment import commit, cpu_name
from hdserve.bench.replay_setup import load_drafting
from hdserve.cli.interruption import how_to_go_on, interruptible
from hdserve.cli.json_option import JobJson, JsonOutput
from hdserve.cli.options import (
    AnswerTokens,
    DraftingFile,
    Limit,
    Model,
    OneDrafter,
    Prompts,
    takes,
)
from hdserve.cli.progress import progress
from hdserve.config import DraftingConfig, ModelConfig, checked
from hdserve.drafting.registry import check_drafters
from hdserve.journal import Journal, file_digest

if TYPE_CHECKING:
    from hdserve.bench.lossless import SettingResult
    from hdserve.engine.host import ModelHost


_HOW_TO_BE_EXACT = (
    "Rounding turned near-ties; with `engine: {exact: true}` (here --exact) it does not."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LosslessOptions:
    """What is compared, and how it is decoded."""

    prompts: Prompts
    model: Model = "hdserve-tiny"
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, float64 or auto.")] = (
        "auto"
    )
    max_tokens: AnswerTokens = 128
    batch_size: Annotated[int, typer.Option(help="Sequences decoded together.", min=1)] = 1
    limit: Limit = None
    exact: Annotated[
        bool | None,
        typer.Option(
            help="`engine.exact` of the configuration.", show_default="auto, as a server has it"
        ),
    ] = None
    drafter: OneDrafter = None
    config: DraftingFile = None
    json_path: JobJson = None


@takes(LosslessOptions)
def check_lossless(options: LosslessOptions) -> None:
    """Compare drafted with plain output, token for token, greedy and sampled.

    Each prompt is decoded plainly, with cold databases, and again with the databases that pass
    filled.  Exits with 1 when a single token differs, or when nothing was accepted.  An interrupted
    job goes on with the plain or drafted half it has not ended when the same command is run again.
    """
    output = JsonOutput(options.json_path)
    drafting = load_drafting(options.config, options.drafter)
    check_drafters(drafting)
    with interruptible(how_to_go_on(output.lasting_file)):
        results, journal = _run(options, drafting, output.lasting_file)
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
    shown = {"model": options.model, "drafters": [each.name for each in drafting.drafters]}
    output.write(shown | {"results": [result.to_json() for result in results]})
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


def _as_served(config: ModelConfig) -> ModelConfig:
    """Return ``config`` with the model compiled if a server would compile it."""
    from hdserve.engine.forward.compiled import can_compile

    if not can_compile():
        return config
    engine = config.engine.model_copy(update={"compile": True})
    return config.model_copy(update={"engine": engine})


def _run(
    options: LosslessOptions, drafting: DraftingConfig, result_path: Path | None
) -> tuple[list[SettingResult], Journal]:
    """Load the model and check it, with a progress bar."""
    from hdserve.bench.lossless import SETTINGS, LosslessCheck
    from hdserve.bench.prompts import encode_prompts, longest_prompt
    from hdserve.engine.host import ModelHost
    from hdserve.prompts import read_prompts

    rows = read_prompts(options.prompts, options.limit)
    engine = {
        "dtype": options.dtype,
        "exact": "auto" if options.exact is None else options.exact,
        "max_num_sequences": options.batch_size,
    }
    values = {"name": options.model, "model": options.model, "engine": engine}
    config = checked(ModelConfig, values).model_copy(update={"drafting": drafting})
    host = ModelHost(_as_served(config))
    journal = Journal(
        result_path, _settings(options, host) | {"drafting": drafting.model_dump(mode="json")}
    )
    longest = longest_prompt(host.model.max_model_len, options.max_tokens)
    encoded = list(encode_prompts(rows, host.tokenizer, longest))
    with progress("decoding", len(SETTINGS) * 3 * len(encoded)) as bar:
        check = LosslessCheck(
            host,
            encoded,
            options.max_tokens,
            batch_size=options.batch_size,
            journal=journal,
            progress=bar.advance,
        )
        return check.run(), journal


def _settings(options: LosslessOptions, host: ModelHost) -> dict[str, Any]:
    """Return the settings that the results depend on."""
    return {
        "model": options.model,
        "prompts": file_digest(options.prompts),
        "limit": options.limit,
        "dtype": str(host.model.dtype).removeprefix("torch."),
        "exact": options.exact,
        "max_tokens": options.max_tokens,
        "batch_size": options.batch_size,
        "hardware": cpu_name() if host.device_name == "cpu" else host.device_name,
        "num_threads": host.num_threads,
        "commit": commit(),
    }
