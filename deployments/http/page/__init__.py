"""The page at ``/``: a chat that shows where each token came from.

Plain files, served as they are: no build step, and nothing is loaded from elsewhere.
"""

from __future__ import annotations

from hashlib import sha256
from importlib.resources import files
from typing import NamedTuple

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response
from starlette.exceptions import HTTPException

_MEDIA_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; connect-src 'self'; img-src 'self'; script-src 'self'; "
        "style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class _File(NamedTuple):
    content: bytes
    headers: dict[str, str]


def add_page_routes(api: FastAPI) -> None:
    """Add ``GET /``, the files it needs, and ``GET /playground``, which redirects to it."""
    found = _read_files()

    def respond(name: str, request: Request) -> Response:
        if name not in found:
            raise HTTPException(404, "there is no such file")
        content, headers = found[name]
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    @api.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return respond("index.html", request)

    @api.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str, request: Request) -> Response:
        return respond(name, request)

    @api.get("/playground", include_in_schema=False)
    async def playground() -> RedirectResponse:
        return RedirectResponse("./")


def _read_files() -> dict[str, _File]:
    """Return the files of the page by name."""
    found = {}
    for item in files(__package__).iterdir():
        kind = _MEDIA_TYPES.get(item.name.rpartition(".")[2])
        if kind is not None:
            content = item.read_bytes()
            etag = f'"{sha256(content).hexdigest()[:16]}"'
            found[item.name] = _File(content, {**_HEADERS, "content-type": kind, "etag": etag})
    return found
