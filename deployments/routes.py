"""The routes of the gateway."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from deployments.access import SignIn
from deployments.admin import add_admin_routes
from deployments.api_pages import add_api_pages
from deployments.body_limit import BodyLimit
from deployments.body_schema import body_schema
from deployments.chat_format import ChatFormat
from deployments.completion_format import CompletionFormat
from deployments.deadline import Deadline
from deployments.documented_api import DocumentedApi
from deployments.generation import GenerationRequest
from deployments.generation_route import (
    GENERATION_ERRORS,
    GENERATION_RESPONSES,
    ignored_header,
    owned,
    request_id,
    streamed_answer,
    whole_answer,
)
from deployments.head_requests import HeadRequests
from deployments.http_errors import add_error_handlers
from deployments.http_metrics import add_metrics_route, known_answers
from deployments.http_tracing import TracedRequests
from deployments.json_body import read_json
from deployments.openai_objects import STREAM_END, server_sent_event
from deployments.origins import allow_origins
from deployments.page import add_page_routes
from deployments.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
)
from deployments.response_builder import ResponseBuilder, ResponseFormat
from deployments.responses_route import add_responses_route
from deployments.tool_parsers import TOOL_PARSERS
from hdserve.errors import InvalidRequest

if TYPE_CHECKING:
    from deployments.gateway import Gateway

_READY_TIMEOUT_S = 2.0


def build_api(gateway: Gateway) -> FastAPI:
    """The ASGI application of a gateway replica."""
    api = DocumentedApi(
        needs_key=gateway.access.needs_key,
        title="hdserve",
        version=version("hdserve"),
        description="LLM serving, losslessly accelerated by hierarchical drafting.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    api.add_middleware(BodyLimit, limits=gateway.config.gateway)
    api.add_middleware(SignIn, access=gateway.access)
    add_error_handlers(api)
    _add_generation_routes(api, gateway)
    add_responses_route(api, gateway)
    _add_model_routes(api, gateway)
    _add_operation_routes(api, gateway)
    add_metrics_route(api, gateway)
    if gateway.tracing.is_on:
        api.add_middleware(TracedRequests, tracing=gateway.tracing)
    add_admin_routes(api, gateway)
    add_api_pages(api)
    add_page_routes(api)
    api.add_middleware(HeadRequests)
    allow_origins(api, gateway.config.gateway.allowed_origins)
    gateway.http_metrics.expect(known_answers(api))
    return api


def _add_generation_routes(api: FastAPI, gateway: Gateway) -> None:
    responses, errors = dict(GENERATION_RESPONSES), dict(GENERATION_ERRORS)

    @api.post("/v1/chat/completions", responses=responses, openapi_extra=body_schema(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        deadline = gateway.deadline()
        body = ChatBody.parse(await deadline.wait(read_json(request)))
        parser = TOOL_PARSERS.get(gateway.model(body.model).tool_parser or "")
        generation = body.to_generation(request_id(request), parser)
        form = ChatFormat(
            parser if body.may_call_tools else None,
            is_one_call=body.parallel_tool_calls is False,
            is_named_call=body.names_tool,
            num_prompt_logprobs=body.prompt_logprobs,
        )
        return await _answer(gateway, body, await owned(request, generation), form, deadline)

    @api.post("/v1/completions", responses=responses, openapi_extra=body_schema(CompletionBody))
    async def completions(request: Request) -> Response:
        """Continue a text."""
        deadline = gateway.deadline()
        body = CompletionBody.parse(await deadline.wait(read_json(request)))
        generation = body.to_generation(request_id(request))
        echoes: tuple[str, ...] = ()
        if body.echo:
            echoes = tuple(
                [
                    prompt
                    if isinstance(prompt, str)
                    else await deadline.wait(gateway.detokenize(body.model, list(prompt), "prompt"))
                    for prompt in body.prompts
                ]
            )
        form = CompletionFormat(
            echoes, num_logprobs=body.logprobs, num_prompt_logprobs=body.prompt_logprobs
        )
        return await _answer(gateway, body, await owned(request, generation), form, deadline)

    @api.post("/tokenize", responses=errors, openapi_extra=body_schema(TokenizeBody))
    async def tokenize(request: Request, response: Response) -> dict[str, Any]:
        """The token ids of a text or a conversation."""
        return await gateway.deadline().wait(_tokenize(gateway, request, response))

    @api.post("/detokenize", responses=errors, openapi_extra=body_schema(DetokenizeBody))
    async def detokenize(request: Request, response: Response) -> dict[str, Any]:
        """The text of token ids."""
        return await gateway.deadline().wait(_detokenize(gateway, request, response))


async def _tokenize(gateway: Gateway, request: Request, response: Response) -> dict[str, Any]:
    body = TokenizeBody.parse(await read_json(request))
    response.headers.update(ignored_header(gateway.config.gateway, body))
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("exactly one of prompt and messages is needed", "prompt")
    if body.prompt is not None:
        tokens = await gateway.tokenize(body.model, body.prompt, body.add_special_tokens)
    else:
        messages = [message.for_template() for message in body.messages or ()]
        num_bytes = len(await request.body())
        tokens = await gateway.tokenize_chat(body.model, messages, num_bytes)
    info = await gateway.describe(body.model)
    return {"count": len(tokens), "max_model_len": info.max_model_len, "tokens": tokens}


async def _detokenize(gateway: Gateway, request: Request, response: Response) -> dict[str, Any]:
    body = DetokenizeBody.parse(await read_json(request))
    response.headers.update(ignored_header(gateway.config.gateway, body))
    return {"prompt": await gateway.detokenize(body.model, list(body.tokens), "tokens")}


def _add_model_routes(api: FastAPI, gateway: Gateway) -> None:
    created = int(time.time())

    def entry(name: str) -> dict[str, Any]:
        root = gateway.model(name).name
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "hdserve",
            "root": root,
        }

    errors: dict[int | str, dict[str, Any]] = {
        status: dict(GENERATION_ERRORS[status]) for status in (401, 404, 503, 504)
    }

    @api.get("/v1/models", responses={401: errors[401]})
    async def models() -> dict[str, Any]:
        """The served models, the default one first; with their context, where it is known."""
        lengths = await gateway.context_lengths()
        entries = [entry(name) for name in gateway.model_names]
        for found in entries:
            if found["root"] in lengths:
                found["max_model_len"] = lengths[found["root"]]
        return {"object": "list", "data": entries}

    @api.get("/v1/models/{name:path}", responses=errors)
    async def model(name: str) -> dict[str, Any]:
        """One model and what its replica runs on."""
        if not name:  # a slash too many behind the list
            raise HTTPException(404)
        found = entry(name)
        info = await gateway.deadline().wait(gateway.describe(name))
        return {
            **found,
            "max_model_len": info.max_model_len,
            "dtype": info.dtype,
            "device": info.device,
            "is_compiled": info.is_compiled,
            "is_exact": info.is_exact,
            "num_threads": info.num_threads,
            "num_slots": info.num_slots,
            "num_kv_tokens": info.num_kv_tokens,
            "num_running": info.num_running,
            "num_waiting": info.num_waiting,
            "weight_bytes": info.weight_bytes,
            "drafters": list(info.drafters),
            "tokenizer_fingerprint": info.tokenizer_fingerprint,
        }


def _add_operation_routes(api: FastAPI, gateway: Gateway) -> None:
    @api.get("/health")
    async def health() -> dict[str, str]:
        """Whether the gateway lives."""
        return {"status": "ok"}

    @api.get("/ready", responses={503: {"description": "A model is not ready"}})
    async def ready() -> JSONResponse:
        """Whether every model answers."""
        missing = await gateway.unready_models(_READY_TIMEOUT_S)
        status = "not ready" if missing else "ready"
        return JSONResponse(
            {"status": status, "not_ready": missing}, status_code=503 if missing else 200
        )

    @api.get("/version")
    async def show_version() -> dict[str, str]:
        """The version of hdserve."""
        return {"version": version("hdserve")}


async def _answer(
    gateway: Gateway,
    body: GenerationBody,
    generation: GenerationRequest,
    form: ResponseFormat,
    deadline: Deadline,
) -> Response:
    """The whole answer, or a stream of it."""
    builder = ResponseBuilder(
        form,
        body.model,
        generation.request_id,
        generation.num_choices,
        includes_usage=body.includes_usage,
    )
    headers = ignored_header(gateway.config.gateway, body)
    messages = gateway.generate(body.model, generation, deadline)
    if not body.stream:
        return await whole_answer(builder, messages, headers)
    return await streamed_answer(
        builder, messages, headers, write=server_sent_event, last=STREAM_END
    )
