"""``hdserve serve`` says when and where it answers."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import islice

import pytest

from deployments.announcement import announce, pauses_s, url_of


class Ready(BaseHTTPRequestHandler):
    """Answers that everything is ready."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("gpu-box", "http://gpu-box:80"),
    ],
)
def test_where_it_answers(host: str, url: str) -> None:
    """An address of IPv6 stands in brackets."""
    assert url_of(host, 80) == url


def test_it_is_ready_past_a_proxy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment's proxy is for others; it may not even reach this machine."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with HTTPServer(("127.0.0.1", 0), Ready) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        waiting = threading.Thread(target=announce, args=(url,), daemon=True)
        waiting.start()
        server.timeout = 20
        server.handle_request()
        waiting.join(20)
    assert not waiting.is_alive()
    assert f"hdserve is ready at {url}" in capsys.readouterr().out


def test_it_asks_more_rarely_the_longer_a_start_takes() -> None:
    """What a model says that cannot start is not lost among the log's lines about being asked."""
    pauses = list(islice(pauses_s(), 140))
    assert pauses == sorted(pauses)
    assert sum(pauses[:24]) < 60
    assert sum(pauses) > 600
    assert pauses[-1] <= 5
