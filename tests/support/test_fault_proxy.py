import contextlib
import http.client
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from s3fs import S3FileSystem

from tests.support.fault_proxy import FaultProxy
from tests.support.s3_server import Endpoint, Rgw, make_bucket

KEYS = ["a b", "a+b", "ü/ß", "100%", "a%20b", "a//b", "x=1&y?z#"]


class Target(ThreadingHTTPServer):
    """A server that answers all requests alike, except /die, and keeps the requests."""

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
        if self.path == "/die":
            self.close_connection = True
            return
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


def test_a_client_that_waits_for_100_continue_gets_it(target: Target) -> None:
    """Clients of S3 ask with `Expect: 100-continue` before they send an object."""
    with FaultProxy(target.endpoint, share=0, seed=0, hang_s=0) as proxy:
        connection = http.client.HTTPConnection(proxy.endpoint.removeprefix("http://"), timeout=120)
        with contextlib.closing(connection):
            connection.putrequest("PUT", "/b/k")
            connection.putheader("Content-Length", "3")
            connection.putheader("Expect", "100-continue")
            connection.endheaders()
            assert connection.sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.send(b"abc")
            assert connection.getresponse().read() == b"body"
    assert target.seen[0][3] == b"abc"


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


def test_a_share_of_the_requests_is_spoilt_and_the_seed_selects_them(target: Target) -> None:
    def play(seed: int) -> dict[str, int]:
        with FaultProxy(target.endpoint, share=0.5, seed=seed, hang_s=0, faults=["500", "503", "slow-down"]) as proxy:
            for _ in range(60):
                send(proxy.endpoint, "GET", "/", {})
            proxy.share = 0
            assert send(proxy.endpoint, "GET", "/", {})[0] == 207
            assert proxy.requests == {"GET": 61}
            return dict(proxy.counts)

    counts = play(1)
    assert set(counts) == {"500", "503", "slow-down", "passed"}
    assert 15 < counts["passed"] < 45
    assert play(1) == counts != play(2)


def test_a_dead_target_closes_the_connection(target: Target) -> None:
    target.server_close()
    with (
        FaultProxy(target.endpoint, share=0, seed=0, hang_s=0) as proxy,
        pytest.raises(http.client.RemoteDisconnected),
    ):
        send(proxy.endpoint, "GET", "/", {})
    assert proxy.counts == {"dead": 1}


def test_a_request_is_passed_on_once(target: Target) -> None:
    """If the server dies during a request, the client under test decides about a retry, not the proxy."""
    with (
        FaultProxy(target.endpoint, share=0, seed=0, hang_s=0) as proxy,
        pytest.raises(http.client.RemoteDisconnected),
    ):
        send(proxy.endpoint, "PUT", "/die", {}, b"1")
    assert len(target.seen) == 1
    assert proxy.counts == {"dead": 1}


def test_unknown_faults_are_refused() -> None:
    """Otherwise a test with a misspelt fault would pass."""
    with pytest.raises(ValueError, match="slowdown"):
        FaultProxy("http://127.0.0.1:1", share=1, seed=0, hang_s=0, faults=["slowdown"])


def test_s3_does_not_notice_the_proxy(s3_server: Endpoint, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signatures stay valid, for keys that need encoding and for uploads in parts."""
    with FaultProxy(s3_server.url, share=0, seed=0, hang_s=0) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        fs = S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
        paths = [f"{bucket}/{key}" for key in KEYS]
        for path in paths:
            fs.pipe_file(path, path.encode())
        assert [fs.cat_file(path) for path in paths] == [path.encode() for path in paths]
        assert fs.cat_file(paths[0], start=1, end=4) == paths[0].encode()[1:4]
        assert [fs.info(path)["size"] for path in paths] == [len(path.encode()) for path in paths]
        assert sorted(fs.find(bucket)) == sorted(paths)
        large = bytes(range(256)) * (11 * 2**12)
        fs.pipe_file(f"{bucket}/large", large, chunksize=5 * 2**20)
        assert fs.cat_file(f"{bucket}/large") == large
        fs.rm([*paths, f"{bucket}/large"])
        assert fs.find(bucket) == []
        assert proxy.requests.keys() >= {"GET", "HEAD", "PUT", "POST"}
        assert proxy.counts.keys() == {"passed"}


@pytest.mark.parametrize("all_of_it", [False, True], ids=["gateway", "all daemons"])
def test_data_survive_a_killed_server(rgw: Rgw, all_of_it: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed server comes back with the same endpoint and data, and is dead in between. Other tests rely on this."""
    endpoint = rgw.endpoint
    bucket = make_bucket(Endpoint(endpoint, is_ours=True), monkeypatch)
    fs = S3FileSystem(skip_instance_cache=True)
    fs.pipe_file(f"{bucket}/key", b"kept")
    kill, start = (rgw.kill, rgw.start) if all_of_it else (rgw.kill_gateway, rgw.start_gateway)
    kill()
    try:
        with pytest.raises(ConnectionRefusedError):
            send(endpoint, "GET", "/", {})
    finally:
        start()
    assert rgw.endpoint == endpoint
    assert fs.cat_file(f"{bucket}/key") == b"kept"
