"""Objects in an S3 bucket, through s3fs, with retries.

Every request is safe to repeat. Objects are written whole. A repeated create recognises its own object by the nonce in
it (`storage.objects.store.Store.create`). So each request is repeated until it succeeds or `patience_s` seconds have
passed, and nothing else is: large objects are sent and fetched in parts, of which only the failed ones are repeated.

botocore reads keys once, and renews those of which it knows the end (roles, and processes that say it). Others, such as
those in a file that another program renews, may expire: then the run ends, and the same command continues it.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import s3fs
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError
from botocore.exceptions import ConnectionError as NoConnectionError
from botocore.handlers import add_expect_header
from botocore.parsers import ResponseParserError
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from storage.errors import UnavailableError
from storage.objects.local import ObjectInfo
from storage.telemetry.metrics import STORE, STORE_RETRIES

logger = logging.getLogger(__name__)
T = TypeVar("T")
_LOGGED = (4, 8, 16, 32, 64, 128)
"""The failed attempts of a request that are logged; fewer failures are ordinary."""
_LONGEST = 10
"""A request is given up after so many request timeouts, even if data still arrive."""
_TRANSIENT = ("SlowDown", "RequestTimeout", "IncompleteBody", "OperationAborted", "ConditionalRequestConflict",
              "BadDigest", "XAmzContentSHA256Mismatch")  # fmt: skip
PART_BYTES = 16 * 2**20
PARTS_AT_ONCE = 4
"""Parts sent or fetched at the same time, which are in memory meanwhile."""
MAX_PARTS = 10_000  # S3's limit for one upload
_REMEDY = (
    "Credentials come from the ordinary AWS chain: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile. If they "
    "have expired, renew them, and run the same command again to continue. `python -m storage doctor` says what they "
    "allow. S3 also refuses what a host signs whose clock is 15 minutes wrong"
)


def is_transient(error: BaseException) -> bool:
    """Return whether the same request may succeed later, because the network or the server failed, not the request."""
    if status := _status(error):
        return (status >= 500 and status != 501) or status in (408, 409, 429) or _code(error) in _TRANSIENT
    if isinstance(error, BotoCoreError):
        return isinstance(error, (HTTPClientError, NoConnectionError, IncompleteReadError))
    return isinstance(error, (ConnectionError, TimeoutError, ResponseParserError, aiohttp.ClientError))


def _refusal(error: BaseException | None) -> ClientError | None:
    """Return botocore's error with S3's answer, which s3fs translates; None if the server did not answer."""
    while error is not None and not isinstance(error, ClientError):
        error = error.__cause__
    return error


def _answer(error: BaseException | None) -> dict[str, Any]:
    refusal = _refusal(error)
    return {} if refusal is None else dict(refusal.response)


def _status(error: BaseException | None) -> int:
    return int(_answer(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _code(error: BaseException | None) -> str:
    return str(_answer(error).get("Error", {}).get("Code", ""))


class _FileSystem(s3fs.S3FileSystem):  # type: ignore[misc]  # s3fs has no types
    """s3fs without retries of its own, which would multiply ours, and without "Expect: 100-continue".

    botocore waits for the answer to that header without a time limit if the server is silent.
    """

    retries = 1
    _prepared: Any = None

    async def set_session(self, *arguments: Any, **keywords: Any) -> Any:
        client = await super().set_session(*arguments, **keywords)
        if client is not self._prepared:
            client.meta.events.unregister("before-call.s3", add_expect_header)
            self._prepared = client
        return client


class S3Backend:
    """The methods of `LocalBackend` for S3. Credentials and endpoint come from the ordinary AWS chain.

    Args:
        request_timeout_s: a request without an answer for so many seconds is sent again.
        patience_s: how many seconds a request is repeated before it fails.
    """

    def __init__(self, request_timeout_s: float, patience_s: float) -> None:
        config = {
            "connect_timeout": min(10.0, request_timeout_s),
            "read_timeout": request_timeout_s,
            "retries": {"total_max_attempts": 1},
            "max_pool_connections": 64,
        }
        # Cached listings never expire and would hide what others write; a cached file system ignores the environment.
        self._fs = _FileSystem(config_kwargs=config, use_listings_cache=False, skip_instance_cache=True)
        self._longest_s = _LONGEST * request_timeout_s
        self._patience_s = patience_s
        self._retrying = Retrying(
            retry=retry_if_exception(is_transient),
            stop=stop_after_delay(patience_s),
            wait=wait_random_exponential(multiplier=0.1, max=5),
            before_sleep=_note_failure,
            reraise=True,
        )

    def size(self, path: str) -> int:
        """Return the size. If the bucket does not exist, so does not the object: the next read or write says why."""
        return int(self._call("head_object", path)["ContentLength"])

    def read(self, path: str) -> bytes:
        return self._fetch(path)

    def write(self, path: str, data: bytes) -> None:
        self._call("put_object", path, Body=data)

    def create(self, path: str, data: bytes) -> bool:
        try:  # one PUT, because some servers ignore the condition on multipart uploads
            self._call("put_object", path, Body=data, IfNoneMatch="*")
        except FileExistsError:
            return False
        return True

    def upload(self, path: str, source: Path) -> None:
        size = source.stat().st_size
        if size <= PART_BYTES:
            self.write(path, source.read_bytes())
            return
        part_size = max(PART_BYTES, math.ceil(size / MAX_PARTS))
        upload = self._call("create_multipart_upload", path)["UploadId"]

        def send(number: int) -> dict[str, Any]:
            with source.open("rb") as file:
                file.seek((number - 1) * part_size)
                data = file.read(part_size)
            sent = self._call("upload_part", path, UploadId=upload, PartNumber=number, Body=data)
            return {"PartNumber": number, "ETag": sent["ETag"]}

        with ThreadPoolExecutor(PARTS_AT_ONCE) as senders:
            parts = list(senders.map(send, range(1, math.ceil(size / part_size) + 1)))
        try:
            self._call("complete_multipart_upload", path, UploadId=upload, MultipartUpload={"Parts": parts})
        except FileNotFoundError as error:
            if _code(error) != "NoSuchUpload":  # it was completed, but the answer was lost
                raise

    def download(self, path: str, target: Path) -> str:
        size, digest = self.size(path), hashlib.sha256()

        def fetch(start: int) -> bytes:
            return self._fetch(path, start=start, end=min(size, start + PART_BYTES))

        with target.open("wb") as file, ThreadPoolExecutor(PARTS_AT_ONCE) as fetchers:
            for begin in range(0, size, PARTS_AT_ONCE * PART_BYTES):  # not all at once: they would all be in memory
                end = min(size, begin + PARTS_AT_ONCE * PART_BYTES)
                for part in fetchers.map(fetch, range(begin, end, PART_BYTES)):
                    file.write(part)
                    digest.update(part)
        return digest.hexdigest()

    def delete(self, path: str) -> None:
        self._call("delete_object", path)

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        bucket, _, start = prefix.partition("/")
        following: dict[str, str] = {}
        while True:
            page = self._call("list_objects_v2", bucket, Prefix=start, **following)
            for entry in page.get("Contents", []):
                yield ObjectInfo(f"{bucket}/{entry['Key']}", int(entry["Size"]), entry["LastModified"].timestamp())
            if not page.get("IsTruncated"):
                return
            following = {"ContinuationToken": page["NextContinuationToken"]}

    def uri(self, path: str) -> str:
        return f"s3://{path}"

    def _call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        bucket, _, key = path.partition("/")
        target = {"Bucket": bucket, "Key": key} if key else {"Bucket": bucket}
        arguments = {"timeout": self._longest_s, **target, **arguments}
        return dict(self._patiently(method, path, partial(self._fs.call_s3, method, **arguments)))

    def _fetch(self, path: str, **limits: int) -> bytes:
        arguments = {"max_concurrency": 1, "timeout": self._longest_s, **limits}
        return bytes(self._patiently("get_object", path, partial(self._fs.cat_file, path, **arguments)))

    def _patiently(self, method: str, path: str, send: Callable[[], T]) -> T:
        """Send a request, and repeat it after transient errors.

        Raises:
            FileNotFoundError, FileExistsError: the answer says so; the cause is the error of s3fs.
            UnavailableError: no success within `patience_s`, or S3 refuses; then the cause is a PermissionError.
        """
        try:
            with STORE.labels(method).time():
                answer: T = self._retrying(lambda _: send(), path)
        except Exception as error:
            cause = _refusal(error) or error  # s3fs shortens S3's text, with some servers to "None"
            if is_transient(error):
                raise UnavailableError(
                    f"{self.uri(path)}: no success within {self._patience_s:g} s: {cause!r}. "
                    "Committed versions are safe; run the same command again to continue from them"
                ) from error
            if _code(error) == "NoSuchBucket":
                bucket = path.partition("/")[0]
                raise UnavailableError(f"there is no bucket {bucket!r}: create it, or correct storage.root") from error
            if raised := _ERRORS.get(_status(error)):
                raise raised(f"{self.uri(path)}: {cause}") from error
            if not isinstance(cause, (ClientError, BotoCoreError, ResponseParserError)):
                raise
            refusal = PermissionError(str(cause))  # no or expired credentials, no region, or what S3 refuses
            raise UnavailableError(f"{self.uri(path)}: {cause}. {_REMEDY}") from refusal
        return answer


_ERRORS = {404: FileNotFoundError, 412: FileExistsError}


def _note_failure(state: RetryCallState) -> None:
    STORE_RETRIES.inc()
    if state.outcome and state.attempt_number in _LOGGED:
        error = state.outcome.exception()
        cause = _refusal(error) or error
        logger.warning("s3://%s: attempt %d failed: %r", state.args[0], state.attempt_number, cause)
