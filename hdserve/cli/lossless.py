"""``hdserve check-lossless``: count on this machine whether drafts change a token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hdserve.bench.environment import commit, cpu_name
from hdserve.cli.interruption import how_to_go_on, interruptible
from hdserve.cli.json_option import JobJson, JsonOutput
from hdserve.cli.progress import progress
from hdserve.cli.prompts_option import Prompts
from hdserve.config import ModelConfig, checked
from hdserve.journal import Journal, file_digest

if TYPE_CHECKING:
    from hdserve.bench.lossless import SettingResult


def check_lossless(
    prompts: Prompts,
    model: Annotated[
        str, typer.Option(help="A bundled model, a directory or a Hugging Face id.")
    ] = "hdserve-tiny",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16, float64 or auto.")
    ] = "auto",
    max_tokens: Annotated[int, typer.Option(help="Tokens per answer.", min=1)] = 128,
    batch_size: Annotated[int, typer.Option(help="Sequences decoded together.", min=1)] = 1,
    limit: Annotated[int | None, typer.Option(help="Only the first N prompts.", min=1)] = None,
    exact: Annotated[
        bool, typer.Option(help="Run forwards at shapes whose rows are bitwise independent.")
    ] = True,
    json_path: JobJson = None,
) -> None:
    """Compare drafted with plain output, token for token, greedy and sampled.

    Each prompt is decoded plainly, with cold databases, and again with the databases that pass
    filled.  Exits with 1 when a single token differs, or when nothing was accepted.  An interrupted
    job goes on with the plain or drafted half it has not ended when the same command is run again.
    """
    output = JsonOutput(json_path)
    with interruptible(how_to_go_on(output.file)):
        results, journal = _run(
            prompts, model, dtype, max_tokens, batch_size, limit, exact, output.file
        )
    for result in results if output.has_text else ():
        typer.echo(
            f"{result.setting} identical {result.identical}/{result.total}"
            f"  ({result.dtype}, {'exact' if result.is_exact else 'not exact'};"
            f" {result.draft_tokens} drafted, {result.accepted_tokens} accepted;"
            f" {result.num_cut_prompts} prompts cut to fit)"
        )
        for difference in result.first_differences:
            typer.echo(f"  {difference}")
    output.write({"model": model, "results": [result.to_json() for result in results]})
    journal.finish()
    if not all(result.is_lossless for result in results):
        raise typer.Exit(1)


def _as_served(config: ModelConfig) -> ModelConfig:
    """Compiled where a server compiles the model, too."""
    from hdserve.engine.compiled_forward import can_compile

    if not can_compile():
        return config
    engine = config.engine.model_copy(update={"compile": True})
    return config.model_copy(update={"engine": engine})


def _run(
    prompts: Path,
    model: str,
    dtype: str,
    max_tokens: int,
    batch_size: int,
    limit: int | None,
    exact: bool,
    result_path: Path | None,
) -> tuple[list[SettingResult], Journal]:
    """Load the model and check it, behind a progress bar."""
    from hdserve.bench.lossless import SETTINGS, LosslessCheck
    from hdserve.bench.prompts import encode_prompt
    from hdserve.engine.host import ModelHost
    from hdserve.prompts import read_prompts

    rows = read_prompts(prompts, limit)
    engine = {"dtype": dtype, "exact": exact, "max_num_sequences": batch_size}
    config = checked(ModelConfig, {"name": model, "model": model, "engine": engine})
    host = ModelHost(_as_served(config))
    settings = {
        "model": model,
        "prompts": file_digest(prompts),
        "limit": limit,
        "dtype": str(host.model.dtype).removeprefix("torch."),
        "exact": exact,
        "max_tokens": max_tokens,
        "batch_size": batch_size,
        "hardware": cpu_name() if host.device_name == "cpu" else host.device_name,
        "num_threads": host.num_threads,
        "commit": commit(),
    }
    journal = Journal(result_path, settings)
    longest = host.model.max_model_len - max_tokens
    encoded = [encode_prompt(row, host.tokenizer, longest) for row in rows]
    with progress("decoding", len(SETTINGS) * 3 * len(encoded)) as bar:
        check = LosslessCheck(
            host,
            encoded,
            max_tokens,
            batch_size=batch_size,
            journal=journal,
            progress=bar.advance,
        )
        return check.run(), journal
