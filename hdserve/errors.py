"""Every error hdserve raises to a user, as one tree.

    HdserveError
    ├── ConfigError               the configuration is wrong; raised before anything starts
    ├── DatabaseError             a draft database cannot be used
    │   ├── SnapshotError         a file or message is corrupt, foreign or too new
    │   ├── DatabaseGone    503   it does not answer; try again
    │   └── DatabaseInUse   503   another process is writing it; try again when it has ended
    ├── UnsupportedModel          the model cannot be served; raised while it loads
    │   └── UnequalResults        packed forwards of it fail, or give other results
    ├── EngineStopped       503   the engine has failed or was closed
    │   └── EngineGone            it had done so before this request came
    ├── ShuttingDown        503   the server is ending
    ├── RequestTimeout      504   the answer took longer than the configuration allows
    └── RequestError              this one request cannot be answered
        ├── InvalidRequest  400   a parameter is wrong
        │   ├── PromptTooLong     the prompt leaves no room in the context
        │   └── Unsupported       a documented parameter that hdserve does not offer
        ├── Unauthorized    401   missing or wrong API key
        ├── Forbidden       403   the API key, or the name of the server, is not for this
        ├── ModelNotFound   404   no such model is served
        ├── NamespaceNotFound 404 the model's database has no such namespace
        ├── BodyTooSlow     408   the request body does not come
        ├── BodyTooLarge    413   the request body is over the limit
        └── Overloaded      429   the queue is full; try again later
            └── GrammarsOverloaded  its grammar is new, and has to wait; others do not

Each carries the HTTP status and the slug that the gateway answers with.  They pickle, so that
they cross process boundaries unchanged.
"""

from __future__ import annotations

from typing import Any, ClassVar


class HdserveError(Exception):
    """Base of all errors that are meant for the user."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConfigError(HdserveError):
    """The configuration is wrong."""

    code = "invalid_config"


class DatabaseError(HdserveError):
    """A draft database cannot be used."""

    code = "database_error"


class SnapshotError(DatabaseError):
    """A snapshot, corpus or message is corrupt, truncated, foreign or too new."""

    code = "invalid_snapshot"


class DatabaseGone(DatabaseError):
    """The process that keeps a draft database does not answer; it may come back."""

    status = 503
    code = "database_gone"


class DatabaseInUse(DatabaseError):
    """Another process is writing the files of a database; this one can when it has ended."""

    status = 503
    code = "database_in_use"


class UnsupportedModel(HdserveError):
    """The model cannot be served."""

    code = "unsupported_model"


class UnequalResults(UnsupportedModel):
    """Packed forwards of the model fail, or give other results than it gives by itself."""

    code = "unequal_results"


class EngineStopped(HdserveError):
    """The engine has failed or was closed; another replica may answer."""

    status = 503
    code = "engine_stopped"


class EngineGone(EngineStopped):
    """The engine had stopped before the request arrived, so another replica can answer it."""

    code = "engine_gone"


class ShuttingDown(HdserveError):
    """The server is ending, and refuses new requests."""

    status = 503
    code = "shutting_down"


class RequestTimeout(HdserveError):
    """The answer was not complete in the time that the configuration allows."""

    status = 504
    code = "request_timeout"


class RequestError(HdserveError):
    """This request cannot be answered; others are not affected.

    Args:
        message: one sentence for the user.
        param: the request parameter at fault, if it is one.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.param)


class InvalidRequest(RequestError):
    """A parameter has a value that is not allowed."""

    status = 400
    code = "invalid_value"


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room for an answer in the model's context.

    Args:
        num_tokens: of the prompt, as far as they were counted.
        max_num_tokens: the most it may have.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        param: str | None = None,
        num_tokens: int | None = None,
        max_num_tokens: int | None = None,
    ) -> None:
        super().__init__(message, param)
        self.num_tokens = num_tokens
        self.max_num_tokens = max_num_tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.param, self.num_tokens, self.max_num_tokens)


class Unsupported(InvalidRequest):
    """A parameter of the OpenAI API that hdserve does not offer."""

    code = "unsupported_parameter"


class Unauthorized(RequestError):
    """The API key is missing or wrong."""

    status = 401
    code = "invalid_api_key"


class Forbidden(RequestError):
    """The API key is right, but may not do this; or nobody may under this name of the server."""

    status = 403
    code = "permission_denied"


class ModelNotFound(RequestError):
    """No model of this name is served."""

    status = 404
    code = "model_not_found"


class NamespaceNotFound(RequestError):
    """The model's database has no namespace of this name."""

    status = 404
    code = "namespace_not_found"


class BodyTooSlow(RequestError):
    """The client stopped sending the request body, or sends it too slowly to be waited for."""

    status = 408
    code = "body_too_slow"


class BodyTooLarge(RequestError):
    """The request body is over the configured limit."""

    status = 413
    code = "request_too_large"


class Overloaded(RequestError):
    """The queue of a model is full."""

    status = 429
    code = "overloaded"

    def __init__(
        self,
        message: str = "too many requests are waiting for this model; try again later",
        param: str | None = None,
    ) -> None:
        super().__init__(message, param)


class GrammarsOverloaded(Overloaded):
    """The grammar of the request is new, and there is no room for one: others are answered."""

    code = "grammars_overloaded"
