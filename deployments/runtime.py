"""How Ray Serve runs the processes of gateways and models.

Ray Serve reads these from the environment of each process, so each deployment brings its own.  By
default it gives the user's code and the router an event loop in a thread each, so that code that
blocks does not hold up health checks.  Nothing of ours blocks, and every message would change
threads four times on its way (docs/adr/0022-the-way-to-the-engine.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_VARIABLES: Mapping[str, str] = {
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
}


def actor_options(num_cpus: float, **options: Any) -> dict[str, Any]:
    """``ray_actor_options`` of a deployment that reserves ``num_cpus``."""
    return {
        "num_cpus": num_cpus,
        "runtime_env": {"env_vars": dict(_VARIABLES)},
        **options,
    }
