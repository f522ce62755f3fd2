"""What a model cannot answer of a file of prompts, told before it answers any."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hdserve.core import SamplingParams
from hdserve.errors import InvalidRequest

if TYPE_CHECKING:
    from hdserve.llm import LLM, Prompt


def check_rows(llm: LLM, prompts: Iterable[Prompt], params: SamplingParams) -> None:
    """Check that a model can answer the rows of a file.

    Args:
        prompts: of all rows of a file, in their order.

    Raises:
        InvalidRequest: one of them cannot be answered; names its row, from 1 on.
    """
    for number, prompt in enumerate(prompts, 1):
        try:
            llm.stream(prompt, params)  # checks it; nobody reads the answer
        except InvalidRequest as error:
            raise type(error)(f"row {number}: {error.message}", error.param) from error
