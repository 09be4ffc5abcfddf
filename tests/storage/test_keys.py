"""Keys of S3 that expire: they are read again, and the error says so if that does not help."""

import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

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


@pytest.mark.parametrize("code", ["RequestExpired", "InvalidToken", "TokenRefreshRequired", "ExpiredToken"])
def test_every_word_for_expired_keys_is_told_alike(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the object, what S3 said and the remedy, after the keys were read again."""
    sent = []

    def refuse(*_: object, **__: object) -> None:
        sent.append(code)
        answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": 400}}
        raise OSError(22, "None") from ClientError(answer, "PutObject")  # s3fs shortens S3's text

    monkeypatch.setattr("s3fs.S3FileSystem.call_s3", refuse)
    with pytest.raises(UnavailableError, match=rf"s3://bucket/root/a: [^\[]*\({code}\).*renew them"):  # no [Errno 22]
        Store("s3://bucket/root", patience_s=1).create("a", b"data")
    assert len(sent) == 2
