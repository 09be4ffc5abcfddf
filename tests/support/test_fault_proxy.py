import contextlib
import http.client
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.support.fault_proxy import FaultProxy


class Target(ThreadingHTTPServer):
    """A server that answers all requests alike, and keeps the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self.endpoint = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """The request handler of `Target`."""

    protocol_version = "HTTP/1.1"
    server: Target

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items() if name != "Connection"}
        self.server.seen.append((self.command, self.path, headers, body))
        self.send_response(207, "Odd")
        self.send_header("Content-Encoding", "gzip")  # the body is not gzip, which a proxy should not notice
        self.send_header("Content-Length", "4")
        self.send_header("Content-Type", "odd/odd")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(b"body")

    do_GET = do_HEAD = do_PUT = do_DELETE = _answer  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing."""


@pytest.fixture
def target() -> Iterator[Target]:
    with Target() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def send(endpoint: str, method: str, path: str, headers: dict[str, str], body: bytes | None = None) -> Any:
    """Send a request; return status, reason, headers and body of its answer, with lower-case names and no date."""
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"), timeout=120)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        answered = {name.lower(): value for name, value in answer.getheaders() if name != "Date"}
        return answer.status, answer.reason, answered, answer.read()


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE"])
def test_requests_and_answers_pass_unchanged(target: Target, method: str) -> None:
    """Signatures cover the encoded path, the headers and the body. An answer to HEAD must keep its length."""
    path = "/b/a%20b%2Bc%25//%C3%BC/../x?uploads&prefix=a%2Fb+c&empty="
    headers = {"Host": "signed.example:80", "Content-Encoding": "gzip,aws-chunked", "X-Amz-Meta-A": "1"}
    body = {"PUT": b"4;chunk-signature=0\r\n\x00\xff\r\n\r\n0", "DELETE": b""}.get(method)
    with FaultProxy(target.endpoint, share=0, seed=0, hang_s=0) as proxy:
        answers = [send(endpoint, method, path, headers, body) for endpoint in (target.endpoint, proxy.endpoint)]
        assert proxy.counts == {"passed": 1}
        assert proxy.requests == {method: 1}
    assert target.seen[1] == target.seen[0]
    direct, passed = answers
    assert passed == direct
    assert passed == (207, "Odd", direct[2], b"" if method == "HEAD" else b"body")
    assert passed[2]["content-length"] == "4"


@pytest.mark.parametrize(
    ("fault", "outcome", "reaches_target"),
    [
        ("500", (500, b"<Code>InternalError</Code>"), False),
        ("503", (503, b"<Code>ServiceUnavailable</Code>"), False),
        ("slow-down", (503, b"<Code>SlowDown</Code>"), False),
        ("reset", ConnectionResetError, False),
        ("hang", http.client.RemoteDisconnected, False),
        ("lost", http.client.RemoteDisconnected, True),
        ("late-500", (500, b"<Code>InternalError</Code>"), True),
    ],
)
def test_a_fault_does_what_its_name_says(
    target: Target, fault: str, outcome: tuple[int, bytes] | type[Exception], reaches_target: bool
) -> None:
    """The client's view of a faulty request may differ from what the server did."""
    hang_s = 2 if fault == "hang" else 1000  # only that fault may wait
    with FaultProxy(target.endpoint, share=1, seed=0, hang_s=hang_s, faults=[fault]) as proxy:
        began = time.monotonic()
        if isinstance(outcome, tuple):
            status, _, _, body = send(proxy.endpoint, "PUT", "/b/k", {}, b"1")
            assert status == outcome[0]
            assert outcome[1] in body
        else:
            with pytest.raises(outcome):
                send(proxy.endpoint, "PUT", "/b/k", {}, b"1")
        assert fault != "hang" or time.monotonic() - began >= hang_s
        assert proxy.counts == {fault: 1}
    assert len(target.seen) == reaches_target
