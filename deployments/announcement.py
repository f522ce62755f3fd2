"""Saying that the server is ready, when its models answer."""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Iterator

from hdserve.direct_http import open_directly

_POLL_S, _MAX_POLL_S = 0.5, 5.0
_POLL_GROWTH = 1.1
_TIMEOUT_S = 30.0
_LOCAL_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""The address for requests, if the listening address means every interface."""


def url_of(host: str, port: int) -> str:
    """Return the URL of a server that listens at ``host``."""
    found = _LOCAL_HOSTS.get(host, host)
    return f"http://[{found}]:{port}" if ":" in found else f"http://{found}:{port}"


def announce(base_url: str) -> None:
    """Wait until the models answer, bypassing any proxy, and say so."""
    for pause_s in pauses_s():
        with (
            contextlib.suppress(OSError, ValueError, http.client.HTTPException),
            open_directly(f"{base_url}/ready", _TIMEOUT_S),
        ):
            break
        time.sleep(pause_s)
    print(f"hdserve is ready at {base_url}", flush=True)


def pauses_s() -> Iterator[float]:
    """Yield the pauses between checks whether the models answer: they get longer, since Ray logs
    each check, and its log should show why a model does not start."""
    pause_s = _POLL_S
    while True:
        yield pause_s
        pause_s = min(_POLL_GROWTH * pause_s, _MAX_POLL_S)
