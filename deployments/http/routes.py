"""The routes of the gateway."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from fastapi import FastAPI

from deployments.http.access import SignIn
from deployments.http.admin import add_admin_routes
from deployments.http.api_pages import add_api_pages
from deployments.http.body_limit import BodyLimit
from deployments.http.completion_routes import add_completion_routes
from deployments.http.documented_api import DocumentedApi
from deployments.http.errors import add_error_handlers
from deployments.http.head_requests import HeadRequests
from deployments.http.hosts import allow_hosts
from deployments.http.messages_route import add_messages_routes
from deployments.http.metrics import add_metrics_route, known_answers, known_streams
from deployments.http.model_routes import add_model_routes
from deployments.http.operation_routes import add_operation_routes
from deployments.http.origins import allow_origins
from deployments.http.page import add_page_routes
from deployments.http.responses_route import add_responses_route
from deployments.http.token_routes import add_token_routes
from deployments.http.tracing import TracedRequests

if TYPE_CHECKING:
    from deployments.gateway import Gateway


def build_api(gateway: Gateway) -> FastAPI:
    """Build the ASGI application of a gateway replica."""
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
    allow_hosts(api, gateway.config.gateway.allowed_hosts)
    add_error_handlers(api)
    add_completion_routes(api, gateway)
    add_token_routes(api, gateway)
    add_responses_route(api, gateway)
    add_messages_routes(api, gateway)
    add_model_routes(api, gateway)
    add_operation_routes(api, gateway)
    add_metrics_route(api, gateway)
    if gateway.tracing.is_on:
        api.add_middleware(TracedRequests, tracing=gateway.tracing)
    add_admin_routes(api, gateway)
    add_api_pages(api)
    add_page_routes(api)
    api.add_middleware(HeadRequests)
    allow_origins(api, gateway.config.gateway.allowed_origins)
    gateway.http_metrics.expect(known_answers(api), known_streams(api))
    return api
