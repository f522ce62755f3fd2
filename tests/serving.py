"""A served application in processes of its own, for end-to-end tests."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai

from benchmarks.server import Server
from tests.ports import free_port


class ServedApplication(Server):
    """``serve run`` in a subprocess on a free port, on a Ray of its own that has no GPU.

    Args:
        directory: for the log and the Serve configuration file.
        config: the hdserve configuration; ``None`` for the default application.  Models are not
            compiled unless it says so.
        ray_address: a running cluster to use; by default one is started with it.
        environment: further environment variables.
    """

    def __init__(
        self,
        directory: Path,
        config: Mapping[str, Any] | None = None,
        ray_address: str = "local",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._clients: list[openai.OpenAI] = []
        port = free_port()
        application = {
            "name": "hdserve",
            "route_prefix": "/",
            "import_path": "deployments:app",
            "args": {} if config is None else {"config": _uncompiled(config)},
        }
        http_options = {"host": "127.0.0.1", "port": port}
        path = directory / "serve.json"
        path.write_text(json.dumps({"http_options": http_options, "applications": [application]}))
        super().__init__(
            [str(Path(sys.executable).with_name("serve")), "run", str(path)],
            port,
            directory / "serve.log",
            {"RAY_ADDRESS": ray_address, "CUDA_VISIBLE_DEVICES": "", **(environment or {})},
        )

    def client(self, api_key: str = "none") -> openai.OpenAI:
        """A client that does not retry."""
        client = openai.OpenAI(base_url=f"{self.base_url}/v1", api_key=api_key, max_retries=0)
        self._clients.append(client)
        return client

    def stop(self) -> None:
        """End it with every process it started."""
        for client in self._clients:
            client.close()
        super().stop()


def _uncompiled(config: Mapping[str, Any]) -> dict[str, Any]:
    def uncompiled(model: Mapping[str, Any]) -> dict[str, Any]:
        engine = model.get("engine", {})
        return {**model, "engine": {**engine, "compile": engine.get("compile") is True}}

    return {**config, "models": [uncompiled(model) for model in config["models"]]}
