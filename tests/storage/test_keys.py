"""Keys of S3 that expire: they are read again, and the error says so if that does not help."""

import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from storage.errors import UnavailableError
from storage.objects.store import Store
from tests.support import s3_server as s3


@pytest.mark.parametrize("source", ["file", pytest.param("process", marks=pytest.mark.long)])
def test_renewed_keys_are_read_again(source: str, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A store works on, in all its threads, once a file or a process has the new keys; until then errors say so."""
    keys, profile = tmp_path / "keys", tmp_path / "profile"
    for name, value in (("SHARED_CREDENTIALS_FILE", keys), ("CONFIG_FILE", profile), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", str(value))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)

    def renew(key: str, secret: str) -> None:
        if source == "file":
            keys.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
        else:
            answer = f'{{"Version": 1, "AccessKeyId": "{key}", "SecretAccessKey": "{secret}"}}'
            (tmp_path / "answer").write_text(answer)
            profile.write_text(f"[default]\ncredential_process = cat {shlex.quote(str(tmp_path / 'answer'))}\n")

    store = Store(f"s3://{bucket}/root")
    renew(s3.KEY, s3.SECRET)
    store.write("a", b"data")
    renew("expired", s3.SECRET)
    store = Store(f"s3://{bucket}/root")
    with pytest.raises(UnavailableError, match=r"root/a: .*\(403\).*HeadObject.*read again.*same command again"):
        store.size("a")
    renew(s3.KEY, s3.SECRET)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(store.read, ["a"] * 8)) == [b"data"] * 8
    assert (store.size("a"), store.create("b", b"new")) == (4, True)


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield the code with which a server refuses every request, as the only element of a list."""
    codes = [""]

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = f"<Error><Code>{codes[0]}</Code><Message>text</Message></Error>" if self.command != "HEAD" else ""
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(400)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_HEAD = do_PUT = do_GET  # noqa: N815 - names of the base class

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "expired")
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(server.serve_forever, 0.01)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        yield codes
        server.shutdown()


def test_every_word_for_expired_keys_is_told_alike(refusing: list[str]) -> None:
    """The error names the object, what S3 said and the remedy, also after a HEAD, whose answer has no text."""
    store, codes = Store("s3://bucket/root", patience_s=1), ("RequestExpired", "InvalidToken", "TokenRefreshRequired")
    for code in codes:
        refusing[0] = code
        with pytest.raises(UnavailableError, match=rf"s3://bucket/root/a: .*\({code}\).*renew them"):
            store.create("a", b"data")
    refusing[0] = "ExpiredToken"
    with pytest.raises(UnavailableError, match=r"s3://bucket/root/a: [^\[]*\(400\).*renew them"):  # no [Errno 22]
        store.exists("a")
