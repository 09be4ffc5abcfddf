"""A receiver of OpenTelemetry's spans (OTLP over HTTP), which keeps them."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class ReceivedSpan:
    """One span; the parent is empty for the root of a trace."""

    name: str
    trace: str
    identity: str
    parent: str
    error: str
    attributes: dict[str, Any]


@dataclass
class Receiver:
    """The spans that arrived at `url` so far, and the bytes of all requests."""

    url: str
    spans: list[ReceivedSpan] = field(default_factory=list)
    services: set[str] = field(default_factory=set)
    received: bytes = b""

    def take(self, body: bytes) -> None:
        self.received += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services |= {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                values = {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in span.attributes}
                ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
                self.spans.append(ReceivedSpan(span.name, *ids, span.status.message, values))

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    def path(self, span: ReceivedSpan) -> list[str]:
        """Return the names from the root of a span's trace to the span."""
        parents = {other.identity: other for other in self.spans}
        return [*(self.path(parents[span.parent]) if span.parent else []), span.name]


@contextmanager
def receiver() -> Iterator[Receiver]:
    """Receive spans on a free port of loopback until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        received = Receiver(f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield received
        server.shutdown()
