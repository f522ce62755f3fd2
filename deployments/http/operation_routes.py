"""Whether the server is alive, whether its models answer, and its version."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.responses import JSONResponse

if TYPE_CHECKING:
    from deployments.gateway import Gateway


def add_operation_routes(api: FastAPI, gateway: Gateway) -> None:
    """Add the routes for operators."""

    @api.get("/health", responses={503: {"description": "The server is shutting down"}})
    async def health() -> JSONResponse:
        """Whether the gateway is alive."""
        if gateway.is_closed:
            return JSONResponse({"status": "shutting down"}, status_code=503)
        return JSONResponse({"status": "ok"})

    @api.get("/ready", responses={503: {"description": "A model is not ready"}})
    async def ready() -> JSONResponse:
        """Whether every model answers."""
        missing = await gateway.unready_models()
        status = "not ready" if missing else "ready"
        return JSONResponse(
            {"status": status, "not_ready": missing}, status_code=503 if missing else 200
        )

    @api.get("/version")
    async def show_version() -> dict[str, str]:
        """The version of hdserve."""
        return {"version": version("hdserve")}
