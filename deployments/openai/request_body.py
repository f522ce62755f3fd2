"""The body of a request that generates: which parameters are read, refused or ignored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ValidationError

from deployments.openai.body import Body, Truth, without_nulls
from deployments.openai.body_errors import first_error
from deployments.openai.labels import check_labels
from hdserve.errors import InvalidRequest, Unsupported

Model = TypeVar("Model", bound=BaseModel)

_MAX_REASON_CHARACTERS = 300
_MAX_PARAM_CHARACTERS = 100

# What other servers document beyond the OpenAI API and would change an answer.
UNSUPPORTED_EXTENSIONS: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "prompt_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "bad_words": ([],),
    "cache_salt": (),
    "ebnf": (),
    "json_schema": (),
    "prompt_embeds": (),
    "regex": (),
    "stop_regex": ([],),
    "enable_thinking": (),
    "grammar": ("",),
    "guided_grammar": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "custom_logit_processor": (),
    "include_reasoning": (True,),
    "logprob_token_ids": ([],),
    "reasoning": ({},),
    "lora_path": (),
    "no_stop_trim": (False,),
    "repetition_detection": ({},),
    "return_hidden_states": (False,),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_reasoning": (True,),
    "thinking": (),
    "thinking_token_budget": (),
    "vllm_xargs": ({},),
}

_SERVICE_TIERS = (None, "auto", "default")
"""The service tiers that ask for what every request gets."""


class OfferedBody(Body):
    """A body that refuses documented parameters which would have an effect it does not offer."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Documented parameters that are not offered, with the values that change nothing."""

    instead: ClassVar[Mapping[str, str]] = {}
    """What to do instead of setting some of them."""

    model: str

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Check the JSON body of a request.

        Raises:
            Unsupported: a documented parameter that is not offered is set.
            InvalidRequest: a value is wrong or missing.
        """
        return parse_body(cls, cls._offered(data))

    @classmethod
    def _offered(cls, data: Any) -> dict[str, Any]:
        """Return the fields that are read."""
        if not isinstance(data, dict):
            raise InvalidRequest("the request body must be a JSON object")
        extensions = UNSUPPORTED_EXTENSIONS.items()
        unsupported = {name: found for name, found in extensions if name not in cls.model_fields}
        unsupported |= cls.unsupported
        for name, neutral in unsupported.items():
            value = without_nulls(data.get(name))
            if value is not None and value not in neutral:
                instead = f": {cls.instead[name]}" if name in cls.instead else ""
                raise Unsupported(f"{name} is not supported{instead}", name)
        unread = cls.without_effect.union(unsupported)
        return {name: data[name] for name in data if name not in unread}

    @property
    def param_names(self) -> Mapping[str, str]:
        """What the request calls parameters that have another name inside."""
        return {}

    @property
    def unmet(self) -> frozenset[str]:
        """Documented parameters that ask for what is not done here and would change no answer."""
        return frozenset()

    @property
    def variables(self) -> Mapping[str, Collection[str]]:
        """For each parameter that only a chat template can meet: the template's variables, of which
        any will do."""
        return {}

    @property
    def left_out(self) -> Mapping[str, Unsupported]:
        """What is left out because the conversation can go on without it, though answers may
        differ: for each name the error that is raised instead if requests are strict."""
        return {}

    @property
    def ignored(self) -> tuple[str, ...]:
        """The unmet parameters, what is left out, and the undocumented fields."""
        undocumented = self.undocumented_inside().union(self.model_extra or ())
        return tuple(sorted(undocumented.union(self.unmet, self.left_out)))


class RequestBody(OfferedBody):
    """What the requests that generate have in common, in all APIs."""

    without_effect: ClassVar[frozenset[str]] = frozenset(
        {
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
        }
    )

    stream: Truth | None = None
    stream_options: Body | None = None
    store: Truth | None = None
    service_tier: str | None = None

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Check the JSON body of a request, as :meth:`OfferedBody.parse` does.

        Raises:
            Unsupported: nothing is to be generated, too.
            InvalidRequest: there are options of a stream, and no stream is asked for, or labels
                are too long, too.
        """
        if isinstance(data, dict):
            check_labels(data)
            _check_generates(data)
        body = super().parse(data)
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("stream_options needs stream: true", "stream_options")
        return body

    @property
    def unmet(self) -> frozenset[str]:
        is_met = {"store": not self.store, "service_tier": self.service_tier in _SERVICE_TIERS}
        return frozenset(name for name, met in is_met.items() if not met)


def parse_body(model: type[Model], data: Any) -> Model:
    """Make a ``model`` of ``data``.

    Raises:
        InvalidRequest: names the first field at fault; the message is bounded whatever was sent.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        location, reason = first_error(error)
        if location:
            reason = f"{'.'.join(map(str, location))}: {reason}"
        param = _printable(str(location[0]))[:_MAX_PARAM_CHARACTERS] if location else None
        raise InvalidRequest(_printable(reason)[:_MAX_REASON_CHARACTERS], param) from error


def _check_generates(body: Mapping[str, Any]) -> None:
    """
    Raises:
        Unsupported: the prompt is to be cached, and nothing generated.
    """
    name = "prompt_cache_options"
    options = body.get(name)
    if isinstance(options, Mapping) and options.get("prewarm"):
        raise Unsupported(f"{name}.prewarm is not supported: every request generates", name)


def _printable(text: str) -> str:
    """Return ``text`` with the halves of surrogate pairs escaped."""
    return text.encode(errors="backslashreplace").decode()
