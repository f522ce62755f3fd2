"""What a request of a model has where it does not say."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from hdserve.config.mistakes import Location, Mistakes
from hdserve.config.strict_model import StrictModel
from hdserve.core import SamplingParams
from hdserve.errors import InvalidRequest


class DefaultsConfig(StrictModel):
    """What a request has where it does not say; ``null`` leaves it to the model's
    ``generation_config.json``.  Values have the bounds of those in a request."""

    temperature: float | None = None
    """0 is greedy."""

    top_p: float | None = None
    """The share of the likeliest tokens that may be chosen; 1 is off."""

    top_k: int | None = None
    """How many of the likeliest tokens may be chosen; 0, or -1, is off."""

    min_p: float | None = None
    """The least probability of a token that may be chosen, as a share of the likeliest one's; 0 is
    off."""

    repetition_penalty: float | None = None
    """1 is off."""

    max_tokens: int | None = None
    """Most tokens of an answer, no limit for requests that ask for more; ``null``: of a chat what
    the context leaves, of a completion 16."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as ``enable_thinking``.  A request replaces them one by
    one, also by parameters that set them, such as ``reasoning_effort`` and ``thinking``."""

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of :class:`~hdserve.core.SamplingParams` that are set."""
        return self.model_dump(exclude={"chat_template_kwargs"}, exclude_none=True)

    @field_validator("top_k")
    @classmethod
    def _check_top_k(cls, top_k: int | None) -> int | None:
        return 0 if top_k == -1 else top_k  # other servers' value for off

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        found: list[tuple[Location, str]] = []
        for name, value in self.sampling.items():
            try:
                SamplingParams(**{name: value})
            except InvalidRequest as error:
                found.append(((name,), error.message))
        if found:
            raise Mistakes(found)
        return self
