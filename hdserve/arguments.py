"""The arguments of offline use, and the messages for wrong ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from operator import index
from typing import Any

from hdserve.core import SamplingParams, SpeculationParams
from hdserve.errors import InvalidRequest

Message = Mapping[str, Any]
"""A message of a chat, as in the OpenAI API."""

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
    "lora_request": "LoRA adapters are not served; merge them into the weights",
    "chat_template": "pass LLM(model, chat_template=PATH)",
    "n": "for several answers to a prompt, repeat it: generate([prompt] * n)",
}
"""What to write instead, by other libraries' names."""

_SAMPLING = frozenset(field.name for field in fields(SamplingParams))


def refuse_keywords(keywords: Iterable[str]) -> None:
    """
    Raises:
        InvalidRequest: there is one; the message says what to write instead.
    """
    for name in keywords:
        instead = _INSTEAD.get(name, "")
        if name in _SAMPLING:
            instead = f"write params=SamplingParams({name}=...)"
        reason = f"there is no argument {name!r}"
        raise InvalidRequest(f"{reason}: {instead}" if instead else reason, name)


def prompts_of(prompts: object) -> list[Any]:
    """The prompts of a list of them.

    Raises:
        InvalidRequest: they are one prompt, or none at all.
    """
    if isinstance(prompts, str | Mapping):
        raise InvalidRequest("put the prompt into a list: generate([prompt])", "prompts")
    if not isinstance(prompts, Iterable):
        raise InvalidRequest(NO_PROMPT, "prompts")
    return list(prompts)


def chats_of(messages: object) -> tuple[list[Sequence[Message]], bool]:
    """The chats, and whether ``messages`` is a single one.

    Raises:
        InvalidRequest: they are not messages.
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
    """The parameters of each prompt; ``None`` means the model's own.

    Raises:
        InvalidRequest: they are neither one for all, nor a list with one for each.
    """
    if isinstance(params, SamplingParams | None):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        reason = "params is one SamplingParams for all prompts, or a list of one for each"
        raise InvalidRequest(reason, "params")
    if len(params) != num_prompts:
        reason = f"{len(params)} params for {num_prompts} prompts: give one each, or one for all"
        raise InvalidRequest(reason, "params")
    return list(params)


def check_speculation(speculation: object) -> None:
    """
    Raises:
        InvalidRequest: it is something else, or its prediction is not token ids.
    """
    if not isinstance(speculation, SpeculationParams | None):
        raise InvalidRequest("one SpeculationParams holds for all prompts", "speculation")
    prediction = speculation.prediction if speculation else ()
    try:
        len(prediction)  # an iterator, which can be read only once, has no length
        for token in prediction:
            index(token)
    except TypeError as error:
        reason = "prediction is the token ids of a text, not the text"
        raise InvalidRequest(reason, "speculation.prediction") from error


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Prefix error messages with ``where``, unless it is empty."""
    try:
        yield
    except InvalidRequest as error:
        if not where:
            raise
        raise type(error)(f"{where}: {error.message}", error.param) from error
