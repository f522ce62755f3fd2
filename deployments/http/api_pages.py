"""``/docs`` and ``/redoc`` with this server's own files, since a cluster may have no internet."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from fastapi.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

from deployments.http.access import DOCS_FILES
from deployments.http.own_path import root_of
from deployments.http.unread_limit import UnreadLimit


def add_api_pages(api: FastAPI) -> None:
    """Add pages that show the schema of ``api``, which must not have its own."""
    api.mount(DOCS_FILES, UnreadLimit(StaticFiles(packages=[("fastapi_offline", "static")])))

    @api.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        root = root_of(request.scope)
        return get_swagger_ui_html(
            openapi_url=f"{root}{api.openapi_url}",
            title=api.title,
            swagger_js_url=f"{root}{DOCS_FILES}/swagger-ui-bundle.js",
            swagger_css_url=f"{root}{DOCS_FILES}/swagger-ui.css",
            swagger_favicon_url=f"{root}{DOCS_FILES}/favicon.png",
        )

    @api.get("/redoc", include_in_schema=False)
    async def redoc(request: Request) -> HTMLResponse:
        root = root_of(request.scope)
        return get_redoc_html(
            openapi_url=f"{root}{api.openapi_url}",
            title=api.title,
            redoc_js_url=f"{root}{DOCS_FILES}/redoc.standalone.js",
            redoc_favicon_url=f"{root}{DOCS_FILES}/favicon.png",
            with_google_fonts=False,
        )
