"""Requests the engine cannot take: prompts and parameters that do not fit the model."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index

from hdserve.core import SamplingParams
from hdserve.errors import InvalidRequest, PromptTooLong


def check_prompt_length(
    num_tokens: int,
    max_total_tokens: int,
    params: SamplingParams,
    param: str = "prompt",
    *,
    is_whole: bool = True,
) -> None:
    """
    Args:
        param: the client's name of the prompt.
        is_whole: whether ``num_tokens`` is the prompt's exact length, not a lower bound.

    Raises:
        PromptTooLong: the prompt leaves no room for an answer, if one is wanted.
    """
    most = max_total_tokens - (params.max_tokens != 0)
    if num_tokens > most:
        number = f"{num_tokens}" if is_whole else f"at least {num_tokens}"
        raise PromptTooLong(
            f"this model's maximum context length is {max_total_tokens} tokens, and the prompt has "
            f"{number}, which leaves none for an answer",
            param,
            num_tokens,
            most,
        )


def check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """
    Args:
        name: of the parameter that contains them.

    Raises:
        InvalidRequest: one of them is not an integer, or not in the vocabulary.
    """
    for token_id in token_ids:
        try:
            is_known = 0 <= index(token_id) < vocab_size
        except TypeError as error:
            raise InvalidRequest(
                f"{name}: {str(token_id)[:20]!r} is not a token id", name
            ) from error
        if not is_known:
            shown = str(token_id)[:20]
            reason = f"{name}: the token id {shown} is not in the vocabulary of {vocab_size}"
            raise InvalidRequest(reason, name)


def check_num_sequences(num_prompts: int, num_choices: int, max_num_open: int) -> None:
    """
    Args:
        max_num_open: most sequences that may be open at a time.

    Raises:
        InvalidRequest: this many choices of each prompt can never be open at once.
    """
    if num_prompts * num_choices > max_num_open:
        reason = f"at most {max_num_open} answers can be generated at a time"
        raise InvalidRequest(reason, "prompt" if num_prompts > max_num_open else "n")


def check_params(params: SamplingParams, vocab_size: int, *, has_text: bool) -> None:
    """
    Args:
        has_text: whether there is a tokenizer to turn tokens into text.

    Raises:
        InvalidRequest: a token id is not in the vocabulary, or stop strings are used without text.
    """
    check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    check_token_ids("logit_bias", params.logit_bias, vocab_size)
    if params.stop and not has_text:
        raise InvalidRequest("stop strings need a tokenizer; use stop_token_ids", "stop")
