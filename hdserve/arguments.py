"""The arguments of offline use: which there are, and what is said of wrong ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from operator import index
from typing import Any

from hdserve.core import SamplingParams, SpeculationParams
from hdserve.errors import InvalidRequest

Message = Mapping[str, Any]
"""One of a chat, as the OpenAI API has it."""

NO_PROMPT = (
    "a prompt is a text, a list of token ids or a list of messages; generate takes a list of "
    "prompts: generate([prompt])"
)
_NO_CHAT = (
    'a chat is a list of messages: chat([{"role": "user", "content": "..."}]); several are a list '
    "of such lists"
)

_INSTEAD: Mapping[str, str] = {
    "sampling_params": "write params",
    "use_tqdm": "no progress is shown; leave it out",
    "prompt_token_ids": "a prompt may be a list of token ids: generate([token_ids])",
    "lora_request": "adapters are not served; merge them into the weights",
    "chat_template": "LLM(model, chat_template=PATH) has it used",
    "n": "for several answers to a prompt, repeat it: generate([prompt] * n)",
}
"""By the names that others have for them."""

_SAMPLING = frozenset(field.name for field in fields(SamplingParams))


def refuse_keywords(keywords: Iterable[str]) -> None:
    """
    Raises:
        InvalidRequest: there is one; says what to write instead.
    """
    for name in keywords:
        instead = _INSTEAD.get(name, "")
        if name in _SAMPLING:
            instead = f"write params=SamplingParams({name}=...)"
        reason = f"there is no argument {name!r}"
        raise InvalidRequest(f"{reason}: {instead}" if instead else reason, name)


def chats_of(messages: object) -> tuple[list[Sequence[Message]], bool]:
    """The chats, and whether ``messages`` are those of one alone.

    Raises:
        InvalidRequest: they are no messages.
    """
    if _is_chat(messages):
        return [messages], True  # type: ignore[list-item]
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise InvalidRequest(_NO_CHAT, "messages")
    if not all(map(_is_chat, messages)):
        raise InvalidRequest(_NO_CHAT, "messages")
    return list(messages), False


def _is_chat(found: object) -> bool:
    is_list = isinstance(found, Sequence) and not isinstance(found, str)
    return is_list and bool(found) and all(isinstance(each, Mapping) for each in found)  # type: ignore[attr-defined]


def params_of_each(params: object, num_prompts: int) -> list[SamplingParams | None]:
    """The parameters of each prompt; ``None`` are the model's own.

    Raises:
        InvalidRequest: they are not one for all, nor a list of one for each.
    """
    if isinstance(params, SamplingParams | None):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        reason = "params is one SamplingParams for all prompts, or a list of one for each"
        raise InvalidRequest(reason, "params")
    if len(params) != num_prompts:
        reason = f"{len(params)} params for {num_prompts} prompts: give one for each, or one alone"
        raise InvalidRequest(reason, "params")
    return list(params)


def check_speculation(speculation: object) -> None:
    """
    Raises:
        InvalidRequest: it is something else, or its prediction is no token ids.
    """
    if not isinstance(speculation, SpeculationParams | None):
        raise InvalidRequest("one SpeculationParams holds for all prompts", "speculation")
    prediction = speculation.prediction if speculation else ()
    try:
        len(prediction)  # which what can be read only once has not
        for token in prediction:
            index(token)
    except TypeError as error:
        reason = "prediction is the token ids of a text, not the text"
        raise InvalidRequest(reason, "speculation.prediction") from error


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Say of what cannot be used where it is, unless ``where`` is empty."""
    try:
        yield
    except InvalidRequest as error:
        if not where:
            raise
        raise type(error)(f"{where}: {error.message}", error.param) from error
