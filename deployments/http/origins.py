"""Web pages of other origins: browsers let them read answers only if the server allows it."""

from __future__ import annotations

from collections.abc import Collection

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

_METHODS = ("DELETE", "GET", "HEAD", "POST")
_SHOWN_HEADERS = (
    "request-id",
    "retry-after",
    "x-hdserve-ignored",
    "x-request-id",
    "x-should-retry",
)


def allow_origins(api: FastAPI, origins: Collection[str]) -> None:
    """Let pages of ``origins``, or of all if ``*`` is among them, call ``api``.

    It must be the last middleware that is added: a browser asks whether it may send a key before it
    sends one.
    """
    if origins:
        api.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=_METHODS,
            allow_headers=("*",),
            expose_headers=_SHOWN_HEADERS,
        )
