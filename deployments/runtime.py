"""How Ray Serve runs the processes of gateways and models.

Ray Serve reads these settings from the environment of each process, so each deployment brings its
own.  By default it runs the user's code and the router in an event loop and thread each, so that
blocking code does not hold up health checks.  Nothing of ours blocks, and every message would
change threads four times on its way (docs/adr/0022-the-way-to-the-engine.md).  By default, too, a
message between two processes goes through the proxy that ``http_proxy`` names, if any, and may have
4 MiB; a larger one fails.  A process that reserves no GPU sees all GPUs of its node, also those of
others.  And clients may send headers that it obeys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hdserve.config.deployed import GRPC_VARIABLES, PROXY_VARIABLES

_VARIABLES: Mapping[str, str] = {
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    **GRPC_VARIABLES,
}

_MESSAGE_VARIABLE = "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"
_MIN_MESSAGE_BYTES = 64 * 2**20
_MAX_MESSAGE_BYTES = 2**31 - 1
_MESSAGE_BYTES_PER_BODY_BYTE = 8
"""How many bytes of a message one byte of a body may become.  A number takes 2 bytes of a body and
up to 9 of a message; a schema is in a message twice, the second time quoted; and a character can be
a token of 5 bytes."""


def actor_options(num_cpus: float, max_body_bytes: int, **options: Any) -> dict[str, Any]:
    """Return the ``ray_actor_options`` of a deployment.

    Args:
        num_cpus: how many it reserves.
        max_body_bytes: of the requests that it passes on or receives.
    """
    num_bytes = max(_MIN_MESSAGE_BYTES, _MESSAGE_BYTES_PER_BODY_BYTE * max_body_bytes)
    limit = {_MESSAGE_VARIABLE: str(min(num_bytes, _MAX_MESSAGE_BYTES))}
    return {
        "num_cpus": num_cpus,
        "runtime_env": {"env_vars": {**_VARIABLES, **PROXY_VARIABLES, **limit}},
        **options,
    }
