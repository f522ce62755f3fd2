"""Asking a server of this machine by HTTP, which a proxy that the environment names may not
reach."""

from __future__ import annotations

import http.client
import urllib.request


def open_directly(url: str, timeout_s: float) -> http.client.HTTPResponse:
    """Return the answer of the server at ``url``, bypassing any proxy.

    Raises:
        OSError, ValueError, HTTPException: it does not answer, or not by HTTP, or with an error.
    """
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    answer: http.client.HTTPResponse = direct.open(url, timeout=timeout_s)
    return answer
