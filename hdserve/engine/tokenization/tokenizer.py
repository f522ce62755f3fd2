"""Tokenizers: loading, rendering chats, and telling two of them apart."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils.chat_template_utils import render_jinja_template

from hdserve.conversation import ChatEnd, check_goes_on
from hdserve.engine.tokenization.chat_template.call_form import CallForm
from hdserve.engine.tokenization.chat_template.content_form import needs_parts, with_parts
from hdserve.engine.tokenization.chat_template.shown_parts import (
    PROBE_TOOL,
    ShownParts,
    shown_parts,
)
from hdserve.engine.tokenization.chat_template.tool_form import (
    Tools,
    lacks_fields,
    needed_fields,
    with_fields,
)
from hdserve.engine.tokenization.chat_template.turn_form import (
    Messages,
    TurnForm,
    may_differ,
    shown_fields,
    turn_form,
)
from hdserve.errors import ConfigError, HdserveError, InvalidRequest, Unsupported
from hdserve.models import is_path, resolve_model
from hdserve.models.hub import check_hub

_DEVELOPER = "developer"
_KNOWS_DEVELOPER = re.compile(rf"""["']{_DEVELOPER}["']""")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""What SentencePiece writes for a space."""

_ANY_LENGTH = 10**30
"""The limit that transformers sets if none is known."""

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_BYTE_OF_CHARACTER: dict[str, int] = {
    character: byte
    for byte, character in bytes_to_unicode().items()  # type: ignore[no-untyped-call]
}


class Tokenizer:
    """The tokenizer of one model.

    Args:
        chat_template: a Jinja template instead of the model's own.
        variables: of the template, for chats that do not set them.

    Raises:
        ConfigError: it is of no kind that can be used, or one of ``variables`` is none.

    Attributes:
        backend: the underlying ``tokenizers.Tokenizer``.
        fingerprint: equal exactly for tokenizers that give the same ids to the same text; the key
            of everything that is stored as token ids.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                f"{type(tokenizer).__name__} has no tokenizer.json; convert it to the format of "
                "the tokenizers library"
            )
        backend.no_truncation()  # which a model that was trained further may have saved
        backend.no_padding()
        tokenizer.model_max_length = _ANY_LENGTH  # how long is too long, the engine says
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        self._tokenizer = tokenizer
        self._default_variables = _defaults(variables or {}, type(tokenizer))
        self.backend = backend
        self.fingerprint = hashlib.sha256(backend.to_str().encode()).hexdigest()
        self._shown: dict[bool, ShownParts] = {}
        self._turn_forms: dict[bool, TurnForm] = {}
        self._need_parts: dict[bool, bool] = {}
        self._variables: dict[tuple[str, bool], bool] = {}

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def template(self) -> str:
        """The chat template for conversations without tools; empty where there is none."""
        return self._template(None)

    @cached_property
    def tools_template(self) -> str:
        """The chat template for conversations with tools; empty if there is none that shows
        them."""
        template = self._template([PROBE_TOOL])
        return template if _reads(template, "tools") else ""

    def has_variable(self, name: str, *, has_tools: bool) -> bool:
        """Whether the chat template reads this variable; the word alone may be a field of messages,
        or text."""
        key = (name, has_tools)
        if key not in self._variables:
            template = self.tools_template if has_tools else self.template
            self._variables[key] = _reads(template, name)
        return self._variables[key]

    def _template(self, tools: list[Mapping[str, Any]] | None) -> str:
        if not self.has_chat_template:
            return ""
        try:
            template: str = self._tokenizer.get_chat_template(tools=tools)
        except ValueError:  # several, none of which is for this or for everything
            return ""
        return template

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if the tokenizer names one."""
        token_id: int | None = self._tokenizer.eos_token_id
        return token_id

    @property
    def blank_token_id(self) -> int | None:
        """The token that a model can go on from where there is no text: the one that begins texts
        or, without it, the one that ends them."""
        token_id: int | None = self._tokenizer.bos_token_id
        return self.eos_token_id if token_id is None else token_id

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """The tokens that a text without special tokens leaves out."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id, added tokens included."""
        ids: dict[str, int] = self.backend.get_vocab(with_added_tokens=True)
        return max(ids.values()) + 1

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, no special tokens added."""
        encoded = self.backend.encode_batch(list(texts), add_special_tokens=False)
        return [list(encoding.ids) for encoding in encoded]

    def encode(self, text: str, *, adds_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens written out in it are recognised.

        Raises:
            InvalidRequest: it has half of a surrogate pair, which is not text.
        """
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=adds_special_tokens)
        except TypeError as error:  # all the library says of it
            raise InvalidRequest("a prompt has half of a surrogate pair", "prompt") from error
        return ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_options: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        end: ChatEnd = ChatEnd.BEFORE_ANSWER,
    ) -> list[int]:
        """Token ids of :meth:`render_chat`, which says what the arguments and errors are."""
        text = self.render_chat(messages, template_options, tools, end)
        return self.encode(text, adds_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_options: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        end: ChatEnd = ChatEnd.BEFORE_ANSWER,
    ) -> str:
        """The text of a conversation, up to ``end``, with all its special tokens.

        Args:
            messages: their role ``developer``, the OpenAI API's newer name of ``system``, is
                ``system`` to templates that do not know it. Turns that the template would refuse or
                drop as they are have another form, see :class:`TurnForm`. Contents are lists of
                one part for a template that takes no texts.
            tools: functions the model may call, in the form of the OpenAI API. Descriptions and
                parameters that they lack are empty for a template that would refuse them without.

        Raises:
            Unsupported: the model has no chat template, or one that does not show tools, calls
                of them or their results, and there are some.
            InvalidRequest: the template refuses these messages, or an option is not one of its
                variables but would change how it is applied.
        """
        if not self.has_chat_template:
            reason = (
                "this model has no chat template, and `chat_template` of its configuration names "
                "none; use /v1/completions, or without a server `hdserve generate --complete`"
            )
            raise Unsupported(reason, "messages")
        check_variables(template_options, type(self._tokenizer))
        if tools and not self.tools_template:
            reason = (
                "this model's chat template does not know tools; `chat_template` of its "
                "configuration can name one that does"
            )
            raise Unsupported(reason, "tools")
        if end is ChatEnd.IN_LAST_MESSAGE:
            check_goes_on(messages)
        turns = self._turns(messages, has_tools=bool(tools))
        form = self._form(turns, has_tools=bool(tools))
        if any(map(lacks_fields, tools)):
            tools = with_fields(tools, self._needed_fields)
        variables = {**self._default_variables, **template_options}
        try:
            return self._render(form, turns, tools, variables, end)
        except Exception as error:  # templates raise whatever their authors chose
            reason = f"the model's chat template refuses these messages: {error}"
            raise InvalidRequest(reason[:500], "messages") from error

    def _render(
        self,
        form: CallForm,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        template_options: Mapping[str, Any],
        end: ChatEnd = ChatEnd.BEFORE_ANSWER,
    ) -> str:
        options = {
            "tools": list(tools) or None,
            "add_generation_prompt": end is ChatEnd.BEFORE_ANSWER,
            "continue_final_message": end is ChatEnd.IN_LAST_MESSAGE,
            **template_options,
        }
        template = self._tokenizer.get_chat_template(tools=options["tools"])
        knows_developer = _KNOWS_DEVELOPER.search(template)
        shown = form.of(messages if knows_developer else _with_system(messages))
        if self._needs_parts(has_tools=bool(tools)):
            shown = with_parts(shown)
        if form.silence_is_none:  # which apply_chat_template leaves out
            options = {**self._tokenizer.special_tokens_map, "chat_template": template, **options}
            return str(render_jinja_template([list(map(dict, shown))], **options)[0][0])
        return str(self._tokenizer.apply_chat_template(shown, tokenize=False, **options))

    def _needs_parts(self, *, has_tools: bool) -> bool:
        if has_tools not in self._need_parts:
            tools = [PROBE_TOOL] if has_tools else None
            self._need_parts[has_tools] = needs_parts(
                lambda messages: str(
                    self._tokenizer.apply_chat_template(
                        messages, tokenize=False, tools=tools, add_generation_prompt=True
                    )
                )
            )
        return self._need_parts[has_tools]

    @cached_property
    def _needed_fields(self) -> Mapping[str, Any]:
        probe = [{"role": "user", "content": "probe"}]

        def render(tools: Tools) -> str:
            return self._render(CallForm(), probe, tools, {})

        return needed_fields(render)

    def _turns(
        self, messages: Sequence[Mapping[str, Any]], *, has_tools: bool
    ) -> Sequence[Mapping[str, Any]]:
        """Return the messages with the turns in the form in which the template shows them."""
        if not may_differ(messages):
            return messages

        def render(form: TurnForm, messages: Messages) -> str:
            tools = (PROBE_TOOL,) if has_tools else ()
            return self._render(CallForm(), form.of(messages), tools, {})

        if has_tools not in self._turn_forms:
            self._turn_forms[has_tools] = turn_form(render, has_tools=has_tools)
        form = self._turn_forms[has_tools]
        shown = shown_fields(render, messages) if form.joins_neighbours else ()
        return form.of(messages, shown)

    def _form(self, messages: Sequence[Mapping[str, Any]], *, has_tools: bool) -> CallForm:
        """Return the form in which the template shows them.

        Raises:
            Unsupported: the template would leave a part of the conversation out.
        """
        has_calls = any(message.get("tool_calls") for message in messages)
        has_results = any(message.get("role") == "tool" for message in messages)
        if not has_calls and not has_results:
            return CallForm()
        if has_tools not in self._shown:  # a model may have a template of its own for tools
            tools = (PROBE_TOOL,) if has_tools else ()
            self._shown[has_tools] = shown_parts(
                lambda form, messages: self._render(form, messages, tools, {})
            )
        shown = self._shown[has_tools]
        if has_calls and not shown.tool_calls:
            raise Unsupported("this model's chat template does not show tool calls", "messages")
        if has_results and not shown.tool_results:
            raise Unsupported("this model's chat template does not show tool results", "messages")
        return shown.form

    def decode(self, token_ids: Sequence[int], *, skips_special_tokens: bool = False) -> str:
        """The text that :class:`~hdserve.engine.tokenization.detokenizer.Detokenizer` gives, too:
        no spaces are taken from before punctuation."""
        text: str = self.backend.decode(token_ids, skip_special_tokens=skips_special_tokens)
        return text

    def written(self, token_ids: Sequence[int]) -> list[str]:
        """Tokens as the vocabulary writes them; those that are not in it are empty."""
        return [self.backend.id_to_token(token_id) or "" for token_id in token_ids]

    def token_text(self, token_id: int) -> str:
        """The text of one token alone, special tokens included."""
        return self.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, which need not be whole characters.

        Byte-level vocabularies write each byte as a printable character, those with byte fallback
        as ``<0xNN>``. A space that SentencePiece writes is lost when a token is decoded alone.
        """
        text = self.token_text(token_id)
        token: str | None = self.backend.id_to_token(token_id)
        if token is None:
            return text.encode()
        if _SPACE in token and text != token:
            return token.replace(_SPACE, " ").encode()
        fallback = _BYTE_TOKEN.fullmatch(token)
        if fallback and text != token:
            return bytes([int(fallback[1], 16)])
        if _REPLACEMENT not in text:
            return text.encode()
        if all(character in _BYTE_OF_CHARACTER for character in token):
            return bytes(_BYTE_OF_CHARACTER[character] for character in token)
        return text.encode()


def _with_system(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [
        {**message, "role": "system"} if message.get("role") == _DEVELOPER else message
        for message in messages
    ]


def check_variables(
    names: Iterable[str], tokenizer: type[PreTrainedTokenizerBase] = PreTrainedTokenizerBase
) -> None:
    """
    Args:
        tokenizer: the class that applies the template.

    Raises:
        InvalidRequest: a name is not a template variable but would change how one is applied.
    """
    options = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in names:
        if name in options or name == "messages":
            raise InvalidRequest(f"{name} is not a template variable", "chat_template_kwargs")


def _defaults(
    variables: Mapping[str, Any], tokenizer: type[PreTrainedTokenizerBase]
) -> Mapping[str, Any]:
    """
    Raises:
        ConfigError: one is not a template variable.
    """
    try:
        check_variables(variables, tokenizer)
    except InvalidRequest as error:
        raise ConfigError(f"defaults.chat_template_kwargs: {error.message}") from error
    return variables


def read_chat_template(path: Path) -> str:
    """The text of a Jinja template.

    Raises:
        ConfigError: it cannot be read, or is not a template.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read the chat template {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read the chat template {path}: {error}") from error
    try:
        render_jinja_template(conversations=[], chat_template=text)  # only compiles it
    except Exception as error:  # Jinja is a dependency of transformers, not ours
        raise ConfigError(f"{path} is not a chat template: {error}") from error
    return text


def load_tokenizer(
    model: str,
    revision: str | None = None,
    *,
    trust_remote_code: bool = False,
    chat_template: Path | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Tokenizer:
    """The tokenizer of a bundled model, a local directory or a Hugging Face id.

    Args:
        chat_template: a file with a template instead of the model's own.
        variables: of the template, for chats that do not set them.

    Raises:
        ConfigError: there is none, or no such template or variable.
    """
    template = None if chat_template is None else read_chat_template(chat_template)
    path = resolve_model(model)
    if is_path(path) and not Path(path).is_dir():
        raise ConfigError(f"cannot load the tokenizer of {model!r}: there is no such directory")
    check_hub(model, revision)
    try:
        return Tokenizer(
            AutoTokenizer.from_pretrained(
                path,
                revision=revision,
                trust_remote_code=trust_remote_code,
                mistral_format=False,  # mistral-common's has no backend of the tokenizers library
            ),
            template,
            variables,
        )
    except HdserveError:
        raise
    except Exception as error:  # of transformers, of tokenizers, or of the model's own code
        is_missing = Path(path).is_dir() and not (Path(path) / "tokenizer.json").exists()
        reason = "it has no tokenizer.json" if is_missing else str(error)
        if not Path(path).is_dir():
            reason += "\nA directory of this machine with the model's files does as well."
        raise ConfigError(f"cannot load the tokenizer of {model!r}: {reason}") from error


def _reads(template: str, name: str) -> bool:
    if re.search(rf"\b{re.escape(name)}\b", template) is None:
        return False
    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateSyntaxError:  # it has statements of transformers
        return True
    return name in meta.find_undeclared_variables(parsed)
