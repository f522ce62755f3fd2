"""A collector of traces: a real HTTP server that reads OTLP."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class CollectedSpan:
    """One span; identities are hexadecimal, ``parent_id`` is empty at the root."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    has_failed: bool
    attributes: dict[str, Any] = field(default_factory=dict)


class Collector:
    """Keeps what arrives at ``endpoint``."""

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        self.endpoint = ""

    def wait(self, num_spans: int, trace_id: str, timeout_s: float = 30.0) -> list[CollectedSpan]:
        """The spans of a trace, when there are at least so many; by their beginning."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = [span for span in list(self.spans) if span.trace_id == trace_id]
            if len(found) >= num_spans:
                return sorted(found, key=lambda span: span.begin_ns)
            time.sleep(0.05)
        raise AssertionError([span.name for span in self.spans])

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _attributes(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [_collected(service, span) for span in scope.spans]


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector on a free port."""
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            assert self.headers["content-type"] == "application/x-protobuf"
            found.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _collected(service: str, span: Any) -> CollectedSpan:
    return CollectedSpan(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == span.status.STATUS_CODE_ERROR,
        _attributes(span.attributes),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
