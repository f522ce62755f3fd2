"""The served models."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request

from deployments.http.arrival import Arrival
from deployments.http.generation_route import GENERATION_ERRORS

if TYPE_CHECKING:
    from deployments.gateway import Gateway


def add_model_routes(api: FastAPI, gateway: Gateway) -> None:
    """Add the routes that list the models and say what they run on."""
    created = int(time.time())
    created_at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def entry(name: str) -> dict[str, Any]:
        """Return what the clients of both APIs expect."""
        root = gateway.model(name).name
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "hdserve",
            "root": root,
            "type": "model",
            "display_name": name,
            "created_at": created_at,
        }

    errors: dict[int | str, dict[str, Any]] = {
        status: dict(GENERATION_ERRORS[status]) for status in (401, 404, 503, 504)
    }

    @api.get("/v1/models", responses={401: errors[401]})
    async def models() -> dict[str, Any]:
        """The served models, the default one first; with their context lengths, if known."""
        lengths = await gateway.infos.context_lengths(gateway.config.models)
        entries = [entry(name) for name in gateway.model_names]
        for found in entries:
            if found["root"] in lengths:
                found["max_model_len"] = lengths[found["root"]]
        ends = {"first_id": entries[0]["id"], "last_id": entries[-1]["id"]}
        return {"object": "list", "data": entries, "has_more": False, **ends}

    @api.get("/v1/models/{name:path}", responses=errors)
    async def model(name: str, request: Request) -> dict[str, Any]:
        """One model and what its replica runs on, if known: no replica is started to find
        out."""
        found = entry(name)
        deadline = Arrival(gateway, request).deadline
        info = await deadline.wait(gateway.infos.now(gateway.model(name)))
        if info is None:
            return found
        told = asdict(info)
        del told["name"]  # the client may have used an alias
        return {**found, **told}
