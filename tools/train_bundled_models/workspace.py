"""The directory of a run.

WORK/tokenizer/       tokenizer files, copied byte for byte
WORK/tokens/          the packed corpus
WORK/settings.json    settings of the run
WORK/checkpoint.pt    the newest checkpoint
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tools.train_bundled_models.packing import PackedCorpus
from tools.train_bundled_models.settings import TrainingSettings

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class Workspace:
    """Paths of a run, and what is read from them."""

    root: Path

    @property
    def tokenizer_directory(self) -> Path:
        """The tokenizer that exported models get."""
        return self.root / "tokenizer"

    @property
    def tokens_directory(self) -> Path:
        """The packed corpus."""
        return self.root / "tokens"

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint; missing before the first one."""
        return self.root / "checkpoint.pt"

    def adopt_tokenizer(self, directory: Path) -> PreTrainedTokenizerBase:
        """Copy the files of an existing tokenizer into the workspace."""
        copy_tokenizer(directory, self.tokenizer_directory)
        return self.tokenizer()

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer of the run."""
        return AutoTokenizer.from_pretrained(self.tokenizer_directory)

    def corpus(self) -> PackedCorpus:
        """Return the packed corpus of the run."""
        return PackedCorpus.load(self.tokens_directory)

    def write_settings(self, settings: TrainingSettings) -> None:
        """Write the settings that :meth:`settings` reads."""
        text = settings.model_dump_json(indent=2) + "\n"
        (self.root / "settings.json").write_text(text, encoding="utf-8")

    def settings(self) -> TrainingSettings:
        """Return the settings of the run that was begun here."""
        text = (self.root / "settings.json").read_text(encoding="utf-8")
        return TrainingSettings.model_validate_json(text)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a tokenizer byte for byte, so that its fingerprint stays the same."""
    target.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copyfile(source / name, target / name)
