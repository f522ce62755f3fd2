"""Reporting rows of a prompt file that a model cannot answer before it answers any."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hdserve.arguments import naming
from hdserve.core import SamplingParams

if TYPE_CHECKING:
    from hdserve.llm import LLM, Prompt


def check_rows(llm: LLM, prompts: Iterable[Prompt], params: SamplingParams) -> None:
    """Check that a model can answer the rows of a file.

    Args:
        prompts: of all rows of a file, in their order.

    Raises:
        InvalidRequest: one cannot be answered; the message names its row, counting from 1.
    """
    for number, prompt in enumerate(prompts, 1):
        with naming(f"row {number}"):
            llm.stream(prompt, params)  # only checks it; the answer is not read
