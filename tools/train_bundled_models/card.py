"""The measured sections of a model card, as markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tools.train_bundled_models.evaluation import HeldOutLoss
from tools.train_bundled_models.packing import SourceCount
from tools.train_bundled_models.samples import Sample


def source_table(sources: Mapping[str, SourceCount]) -> str:
    """Return a table of the training text by source, with licences."""
    rows = [
        [count.kind, name, count.licence, f"{count.bytes / 1e6:.1f}", f"{count.tokens / 1e6:.2f}"]
        for name, count in sorted(sources.items(), key=lambda item: (item[1].kind, item[0]))
    ]
    return _table(["kind", "source", "licence", "MB", "million tokens"], rows)


def loss_table(losses: Mapping[int, HeldOutLoss]) -> str:
    """Return a table of the held-out loss by kind, one row for each window length (the key, in
    tokens)."""
    kinds = sorted({kind for loss in losses.values() for kind in loss.by_kind})
    rows = [
        [f"{length:,}", f"{loss.overall.num_tokens:,}"]
        + [f"{loss.by_kind[kind].mean:.3f}" if kind in loss.by_kind else "-" for kind in kinds]
        + [f"{loss.overall.mean:.3f}"]
        for length, loss in losses.items()
    ]
    return _table(["window, tokens", "scored tokens", *kinds, "all"], rows)


def position_table(loss: HeldOutLoss) -> str:
    """Return a table of the held-out loss by position in the window."""
    first = 0
    rows = []
    for end, part in sorted(loss.by_position.items()):
        rows.append([f"{first:,} to {end - 1:,}", f"{part.mean:.3f}"])
        first = end
    return _table(["position", "nats per token"], rows)


def sample_blocks(samples: Iterable[Sample]) -> str:
    """Return prompts and answers as blocks of text."""
    return "\n\n".join(
        f"> **{one.prompt}**\n\n```text\n{one.answer.strip()}\n```" for one in samples
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
