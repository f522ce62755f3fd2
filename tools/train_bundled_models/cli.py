"""The commands of the recipe, in the order in which they are used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.train_bundled_models.card import (
    loss_table,
    position_table,
    sample_blocks,
    source_table,
)
from tools.train_bundled_models.corpus import EXCLUDED_SOURCES, read_documents
from tools.train_bundled_models.evaluation import held_out_loss
from tools.train_bundled_models.export import export
from tools.train_bundled_models.packing import PackedCorpus, pack
from tools.train_bundled_models.samples import sample
from tools.train_bundled_models.settings import Device, Size, TrainingSettings
from tools.train_bundled_models.tokenizer import train_tokenizer
from tools.train_bundled_models.training import StepReport, TrainingRun
from tools.train_bundled_models.workspace import Workspace

app = typer.Typer(
    help="Train the small models that ship with hdserve.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Corpus = Annotated[Path, typer.Argument(help="Corpus file (.jsonl or .jsonl.gz).")]
Work = Annotated[Path, typer.Option(help="Directory of the run.")]
Excluded = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude",
        help="Leave out sources whose name begins with this; may be repeated; '' excludes none.",
    ),
]
Threads = Annotated[int, typer.Option(help="CPU threads.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, or auto.")]

_LOG_EVERY_STEPS = 100
_QUICK_LOOK_TOKENS = 16_384


@app.command("tokenizer")
def tokenizer_command(
    corpus: Corpus,
    output: Annotated[Path, typer.Option(help="Directory to write.")],
    vocab_size: Annotated[int, typer.Option(help="Number of tokens.")] = 8192,
    exclude: Excluded = None,
) -> None:
    """Train a byte-level BPE tokenizer."""
    documents = read_documents(corpus, _excluded(exclude))
    train_tokenizer(documents, vocab_size).save_pretrained(output)


@app.command()
def prepare(
    corpus: Corpus,
    work: Work,
    tokenizer: Annotated[Path, typer.Option(help="Directory of the tokenizer.")],
    exclude: Excluded = None,
    standard_library: Annotated[
        bool, typer.Option(help="Add the Python source of this interpreter's library.")
    ] = True,
) -> None:
    """Tokenise and pack the corpus."""
    workspace = Workspace(work)
    loaded = workspace.adopt_tokenizer(tokenizer)
    documents = read_documents(corpus, _excluded(exclude), standard_library)
    packed = pack(documents, loaded, workspace.tokens_directory)
    typer.echo(source_table(packed.sources))


@app.command()
def train(
    work: Work,
    size: Annotated[Size, typer.Option(help="Shape of the model.")],
    tokens: Annotated[int, typer.Option(help="Training tokens of the whole run.")],
    tokens_per_step: Annotated[int, typer.Option(help="Tokens of a step.")] = 4096,
    learning_rate: Annotated[float, typer.Option(help="After the warm-up.")] = 6e-3,
    seed: Annotated[int, typer.Option(help="Of the weights and of the order of the text.")] = 0,
    device: DeviceOption = "auto",
    threads: Threads = 1,
    compile_model: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Fuse the model; needs a C compiler.")
    ] = True,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 250,
) -> None:
    """Train, or continue from the checkpoint in the directory of the run."""
    torch.set_num_threads(threads)
    workspace = Workspace(work)
    settings = TrainingSettings(
        size=size,
        total_tokens=tokens,
        tokens_per_step=tokens_per_step,
        learning_rate=learning_rate,
        seed=seed,
    )
    run = TrainingRun(settings, workspace.tokenizer(), _device(device), compile_model)
    if workspace.checkpoint.exists():
        run.restore(workspace.checkpoint)
    workspace.write_settings(settings)
    _train_with_progress(run, workspace, checkpoint_every)


@app.command("export")
def export_command(
    work: Work, output: Annotated[Path, typer.Option(help="Directory to write.")]
) -> None:
    """Export the newest checkpoint as a Hugging Face directory."""
    workspace = Workspace(work)
    tokenizer = workspace.tokenizer()
    run = TrainingRun(workspace.settings(), tokenizer)
    run.restore(workspace.checkpoint)
    export(run, tokenizer, workspace.tokenizer_directory, output)


@app.command()
def report(
    work: Work,
    model: Annotated[Path, typer.Option(help="Directory of an exported model.")],
    device: DeviceOption = "auto",
    threads: Threads = 1,
) -> None:
    """Print the measured sections of the model card: text, held-out loss, samples."""
    torch.set_num_threads(threads)
    corpus = Workspace(work).corpus()
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(_device(device))
    losses = {
        length: held_out_loss(loaded, corpus.streams["valid"], length) for length in (256, 2048)
    }
    sections = {
        "Training text": source_table(corpus.sources),
        "Held-out loss, nats per token": loss_table(losses),
        "Held-out loss by position": position_table(losses[2048]),
        "Greedy samples": sample_blocks(sample(loaded, tokenizer)),
        "Samples at temperature 0.8": sample_blocks(sample(loaded, tokenizer, temperature=0.8)),
    }
    for title, text in sections.items():
        typer.echo(f"## {title}\n\n{text}\n")


def _train_with_progress(run: TrainingRun, workspace: Workspace, checkpoint_every: int) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    num_steps = run.settings.num_steps
    corpus = workspace.corpus()
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=num_steps, completed=run.step)
        for step in run.train(corpus):
            progress.update(task, completed=step.step, description=f"loss {step.loss:.3f}")
            if step.step % _LOG_EVERY_STEPS == 0:
                progress.console.print(_log_line(step), highlight=False, soft_wrap=True)
            if step.step % checkpoint_every == 0 or step.step == num_steps:
                run.save(workspace.checkpoint)
                progress.console.print(_quick_look(run, corpus), highlight=False, soft_wrap=True)


def _log_line(step: StepReport) -> str:
    return (
        f"step {step.step} tokens {step.num_tokens:,} loss {step.loss:.3f} "
        f"lr {step.learning_rate:.2e} {step.num_tokens / step.elapsed_s:,.0f} tokens/s"
    )


def _quick_look(run: TrainingRun, corpus: PackedCorpus) -> str:
    length = min(256, run.settings.length_tokens(run.step))
    loss = held_out_loss(run.model, corpus.streams["valid"], length, _QUICK_LOOK_TOKENS)
    kinds = " ".join(f"{kind} {part.mean:.3f}" for kind, part in loss.by_kind.items())
    return f"checkpoint at step {run.step}; held out (a part): {kinds}"


def _excluded(sources: list[str] | None) -> tuple[str, ...]:
    if sources is None:
        return EXCLUDED_SOURCES
    return tuple(source for source in sources if source)


def _device(name: str) -> Device:
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        return "cuda"
    if name in ("cpu", "auto"):
        return "cpu"
    raise typer.BadParameter(f"unknown device {name!r}: use cpu, cuda or auto")
