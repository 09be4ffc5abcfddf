import contextlib
import http.client
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from s3fs import S3FileSystem

from tests.support.fault_proxy import FaultProxy
from tests.support.s3_server import Endpoint

KEYS = ["a b", "a+b", "ü/ß", "100%", "a%20b", "a//b", "x=1&y?z#"]


class Target(ThreadingHTTPServer):
    """A server that answers PUT, and counts the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen = 0
        self.endpoint = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """The request handler of `Target`."""

    server: Target

    def do_PUT(self) -> None:
        self.server.seen += 1
        self.send_response(200)
        self.end_headers()


@pytest.fixture
def target() -> Iterator[Target]:
    with Target() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def put(endpoint: str) -> tuple[int, bytes]:
    """Send a request; return status and body of its answer."""
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"), timeout=120)
    with contextlib.closing(connection):
        connection.request("PUT", "/b/k", b"1")
        answer = connection.getresponse()
        return answer.status, answer.read()


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
            status, body = put(proxy.endpoint)
            assert status == outcome[0]
            assert outcome[1] in body
        else:
            with pytest.raises(outcome):
                put(proxy.endpoint)
        assert fault != "hang" or time.monotonic() - began >= hang_s
        assert proxy.counts == {fault: 1}
    assert target.seen == reaches_target


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
