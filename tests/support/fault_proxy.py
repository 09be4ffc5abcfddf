"""A proxy for an S3 server that spoils a share of the requests, like a bad network or an overloaded server."""

import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import urlsplit

# The status and code of faults that are answers.
_ERRORS = {
    "500": (500, "InternalError"),
    "503": (503, "ServiceUnavailable"),
    "slow-down": (503, "SlowDown"),
    "late-500": (500, "InternalError"),
}
_DONE = ("lost", "late-500")  # the server does the request, but the client does not get its answer
ALL = ("500", "503", "slow-down", "reset", "hang", *_DONE)


class FaultProxy(ThreadingHTTPServer):
    """Passes requests on unchanged to `target`, except for a share of them. A context manager with its own threads.

    Faults: `500`, `503` and `slow-down` are answered and not passed on. `reset` resets the connection at once, `hang`
    closes it after `hang_s` of silence. `lost` passes the request on and closes the connection instead of an answer.
    `late-500` passes it on and answers 500. If the target is dead, the connection is closed as well.

    Attributes:
        endpoint: the URL for clients.
        counts: number of requests by fault or `passed`.
    """

    def __init__(self, target: str, share: float, seed: int, hang_s: float, faults: Sequence[str] = ALL) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.endpoint, self.counts = f"http://127.0.0.1:{self.server_port}", Counter[str]()
        self.target, self.hang_s = urlsplit(target.rstrip("/")), hang_s
        self._share, self._faults, self._dice = share, list(faults), random.Random(seed)

    def next_fault(self) -> str:
        fault = self._dice.choice(self._faults) if self._dice.random() < self._share else "passed"
        self.counts[fault] += 1
        return fault

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Each connection is closed after one request."""

    server: FaultProxy

    def spoil(self) -> None:
        fault = self.server.next_fault()
        if fault == "hang":
            time.sleep(self.server.hang_s)
        elif fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        else:
            with suppress(HTTPException, OSError):  # the target or the client is gone
                self._answer(fault, self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _answer(self, fault: str, body: bytes) -> None:
        if fault in ("passed", *_DONE):
            answer = self._ask(body)
        if fault == "passed":
            self._send(*answer)
        elif fault in _ERRORS:
            status, code = _ERRORS[fault]
            self._send(status, {"Content-Type": "application/xml"}, f"<Error><Code>{code}</Code></Error>".encode())

    def _ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        target = self.server.target
        asked = (HTTPSConnection if target.scheme == "https" else HTTPConnection)(target.netloc)
        asked.putrequest(self.command, target.path + self.path, skip_host=True, skip_accept_encoding=True)
        for header in self.headers.items():
            asked.putheader(*header)
        asked.endheaders(body)
        answer = asked.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()

    def _send(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name not in ("Connection", "Transfer-Encoding"):  # which are not those of this connection
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


for _method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
    setattr(_Handler, f"do_{_method}", _Handler.spoil)
