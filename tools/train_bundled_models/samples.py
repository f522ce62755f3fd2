"""Samples that show what a model writes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROMPTS = (
    "Hello! What can you do for me?",
    "I want to book a table for two people in San Jose this evening.",
    "Tom has 12 apples. He gives 5 to Anna and buys 3 more. How many apples does he have?",
    "Write a Python function that returns the largest number of a list.",
)
_MAX_NEW_TOKENS = 80


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and the model's answer to it."""

    prompt: str
    answer: str


@torch.inference_mode()
def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    temperature: float = 0.0,
) -> list[Sample]:
    """Return answers to single-turn chats, each of one of the prompts.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer, with a chat template.
        temperature: 0 decodes greedily; else the answers are drawn with top_p 0.95.
    """
    choice = {"do_sample": True, "temperature": temperature, "top_p": 0.95, "top_k": 0}
    samples = []
    for prompt in PROMPTS:
        torch.manual_seed(0)
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        encoded = tokenizer(str(text), return_tensors="pt").to(model.device)
        output = model.generate(
            **encoded,
            max_new_tokens=_MAX_NEW_TOKENS,
            **(choice if temperature > 0 else {"do_sample": False}),
        )
        answer = output[0, encoded["input_ids"].shape[1] :]
        samples.append(Sample(prompt, str(tokenizer.decode(answer, skip_special_tokens=True))))
    return samples
