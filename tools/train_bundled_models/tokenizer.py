"""The tokenizer: byte-level BPE with the chat template attached."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tools.train_bundled_models.chat import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    SPECIAL_TOKENS,
    TURN_END,
    TURN_START,
)
from tools.train_bundled_models.corpus import Document
from tools.train_bundled_models.settings import MAX_POSITIONS

OTHER_TEXT_EVERY = 3
"""Conversations are all learnt from; of every other kind one document in this many."""


def train_tokenizer(documents: Iterable[Document], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn byte-level BPE merges (Sennrich et al., 2016, over bytes) from the training split.

    Args:
        documents: the corpus; held-out documents are skipped.
        vocab_size: tokens, the special ones and the 256 bytes included.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    training = (document for document in documents if document.split == "train")
    texts = (
        document.text
        for number, document in enumerate(training)
        if document.kind == "chat" or number % OTHER_TEXT_EVERY == 0
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        extra_special_tokens=[TURN_START],
        model_max_length=MAX_POSITIONS,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
