"""The corpus as token arrays on disk, and the batches drawn from them.

Documents of one kind and split are concatenated, each followed by ``<|endoftext|>``; a training
row is a window of that stream. The windows of one pass do not overlap, and a pass is a new
shuffle, so the rows depend on the seed and on how many were drawn, and a run resumes exactly.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from tools.train_bundled_models.chat import END_OF_TEXT
from tools.train_bundled_models.corpus import Document, Split

TokenArray = npt.NDArray[np.uint16]

_BATCH_OF_DOCUMENTS = 256


@dataclass(slots=True)
class SourceCount:
    """What was taken from one source."""

    kind: str
    licence: str
    documents: int = 0
    bytes: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class PackedCorpus:
    """Token streams by split and kind, and the account of their sources (training split)."""

    streams: Mapping[Split, Mapping[str, TokenArray]]
    sources: Mapping[str, SourceCount]

    @classmethod
    def load(cls, directory: Path) -> PackedCorpus:
        """Map the streams that ``pack`` wrote."""
        streams: dict[Split, dict[str, TokenArray]] = {"train": {}, "valid": {}}
        for split, kinds in streams.items():
            for path in sorted(directory.glob(f"{split}.*.npy")):
                kinds[path.name.split(".")[1]] = np.load(path, mmap_mode="r")
        account = json.loads((directory / "sources.json").read_text(encoding="utf-8"))
        return cls(streams, {name: SourceCount(**count) for name, count in account.items()})


@dataclass(slots=True)
class _Streams:
    """Streams while they are being written."""

    parts: dict[tuple[Split, str], list[TokenArray]] = field(default_factory=dict)
    sources: dict[str, SourceCount] = field(default_factory=dict)

    def add(self, document: Document, token_ids: list[int]) -> None:
        tokens = np.array(token_ids, dtype=np.uint16)
        self.parts.setdefault((document.split, document.kind), []).append(tokens)
        if document.split == "train":
            count = self.sources.setdefault(
                document.source, SourceCount(document.kind, document.licence)
            )
            count.documents += 1
            count.bytes += len(document.text.encode())
            count.tokens += len(tokens)


def pack(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, directory: Path
) -> PackedCorpus:
    """Tokenise documents into one stream per split and kind, and write them to ``directory``.

    Raises:
        ValueError: the vocabulary has more than 65,536 tokens.
    """
    if len(tokenizer) > np.iinfo(np.uint16).max + 1:
        raise ValueError(f"a vocabulary of {len(tokenizer)} does not fit 16 bits")
    (separator,) = tokenizer.encode(END_OF_TEXT, add_special_tokens=False)
    streams = _Streams()
    for batch in _batches(documents):
        encoded = tokenizer([document.text for document in batch], verbose=False)["input_ids"]
        for document, token_ids in zip(batch, encoded, strict=True):
            streams.add(document, [*token_ids, separator])
    directory.mkdir(parents=True, exist_ok=True)
    for (split, kind), parts in streams.parts.items():
        np.save(directory / f"{split}.{kind}.npy", np.concatenate(parts))
    account = {name: asdict(count) for name, count in sorted(streams.sources.items())}
    text = json.dumps(account, indent=2, ensure_ascii=False) + "\n"
    (directory / "sources.json").write_text(text, encoding="utf-8")
    return PackedCorpus.load(directory)


@dataclass(slots=True)
class BatchSampler:
    """Training batches with a fixed mixture of kinds.

    Args:
        streams: token stream of each kind.
        weights: share of the rows of each kind; kinds without text are ignored.
        seed: fixes the order of the rows.
        drawn_tokens: tokens drawn from each kind so far. This is the whole state of the sampler:
            one that is given the same numbers goes on with the same rows.
    """

    streams: Mapping[str, TokenArray]
    weights: Mapping[str, float]
    seed: int
    drawn_tokens: dict[str, int] = field(default_factory=dict)

    def batch(self, num_rows: int, length: int) -> npt.NDArray[np.int64]:
        """Return the next rows of ``length + 1`` tokens: inputs and, shifted by one, targets.

        Returns:
            Shape ``(num_rows, length + 1)``.

        Raises:
            ValueError: no weighted kind has ``length + 1`` tokens.
        """
        rows = []
        for kind, quota in self._quotas(num_rows, length).items():
            drawn = self.drawn_tokens.get(kind, 0)
            rows.append(self._rows(kind, drawn // length, quota, length))
            self.drawn_tokens[kind] = drawn + quota * length
        return np.concatenate(rows)

    def _quotas(self, num_rows: int, length: int) -> dict[str, int]:
        """Return the number of rows of each kind: systematic sampling, so the shares are exact on
        average."""
        kinds = [kind for kind, stream in self.streams.items() if len(stream) > length]
        weights = np.array([self.weights.get(kind, 0.0) for kind in kinds])
        if weights.sum() <= 0:
            raise ValueError(f"no kind of text in the mixture has {length + 1} tokens")
        offset = np.random.default_rng(_key(self.seed, sorted(self.drawn_tokens.items()))).random()
        bounds = np.cumsum(weights) / weights.sum()
        points = (np.arange(num_rows) + offset) / num_rows
        chosen = np.searchsorted(bounds[:-1], points, side="right")
        counts = np.bincount(chosen, minlength=len(kinds)).tolist()
        return {kind: count for kind, count in zip(kinds, counts, strict=True) if count}

    def _rows(self, kind: str, first: int, count: int, length: int) -> npt.NDArray[np.int64]:
        """Return windows ``first`` to ``first + count`` of the endless sequence of passes."""
        stream = self.streams[kind]
        num_windows = (len(stream) - 1) // length
        starts: list[int] = []
        while len(starts) < count:
            epoch, position = divmod(first + len(starts), num_windows)
            order = np.random.default_rng(_key(self.seed, kind, length, epoch))
            shift = int(order.integers(0, len(stream) - num_windows * length))
            windows = order.permutation(num_windows)[position : position + count - len(starts)]
            starts += (shift + windows * length).tolist()
        return np.stack([stream[start : start + length + 1] for start in starts]).astype(np.int64)


def _key(*parts: object) -> int:
    """Return a seed that depends on all parts and on nothing else."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")


def _batches(documents: Iterable[Document]) -> Iterable[list[Document]]:
    batch: list[Document] = []
    for document in documents:
        batch.append(document)
        if len(batch) == _BATCH_OF_DOCUMENTS:
            yield batch
            batch = []
    if batch:
        yield batch
