"""Objects in an S3 bucket, through s3fs, with retries.

Every call is safe to repeat. Objects are written whole. A repeated create recognises its own object by the nonce in it
(`storage.objects.store.Store.create`). So each call is retried until it succeeds or `patience_s` seconds have passed.
"""

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import s3fs
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError
from botocore.exceptions import ConnectionError as NoConnectionError
from botocore.handlers import add_expect_header
from botocore.parsers import ResponseParserError
from fsspec.asyn import sync_wrapper
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_delay,
    wait_random_exponential,
)

from storage.errors import StorageError, UnavailableError
from storage.objects.interface import ObjectInfo, Upload

logger = logging.getLogger(__name__)

_FIRST_LOGGED = 4
"""The first failed attempt of a request that is logged; fewer failures are ordinary."""
_LONGEST = 10
"""A request is given up after so many request timeouts, even if data still arrive."""

_TRANSIENT = ("SlowDown", "RequestTimeout", "IncompleteBody", "OperationAborted", "ConditionalRequestConflict",
              "BadDigest", "XAmzContentSHA256Mismatch")  # fmt: skip
_NOT_IMPLEMENTED = 501
T = TypeVar("T")

PART_BYTES = 16 * 2**20
PARTS_AT_ONCE = 4
"""Parts sent or fetched at the same time, which are in memory meanwhile."""
MAX_PARTS = 10_000  # S3's limit for one upload
_MOST_CLOCK_ERROR_S = 600.0
"""S3 refuses requests that were signed more than 15 minutes ago, or that much in the future."""
_CONFLICT = ("PreconditionFailed", "412")
_CREDENTIALS = (
    "Credentials come from the ordinary AWS chain: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile; "
    "`python -m storage doctor` says what they allow"
)


class PatientFileSystem(s3fs.S3FileSystem):  # type: ignore[misc]  # s3fs has no types
    """A file system that retries each request by itself: a failed part of a multipart upload is sent again alone.

    Args:
        request_timeout_s: a request is sent again after so many seconds without data.
        patience_s: how many seconds a request is retried.
        options: passed to s3fs.
    """

    retries = 1  # s3fs's own retries would multiply ours

    def __init__(self, request_timeout_s: float, patience_s: float, **options: Any) -> None:
        config = {
            "connect_timeout": min(10.0, request_timeout_s),
            "read_timeout": request_timeout_s,
            "retries": {"total_max_attempts": 1},
        }
        super().__init__(config_kwargs=config, **options)
        self._longest_s, self._patience_s = _LONGEST * request_timeout_s, patience_s
        self._prepared: Any = None

    async def _call_s3(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        async for attempt in AsyncRetrying(retry=retry_if_exception(is_transient), **_patience(self._patience_s)):
            with attempt:
                await self._prepare()
                return await asyncio.wait_for(super()._call_s3(method, *arguments, **keywords), self._longest_s)
        raise AssertionError("an attempt returns or raises")

    call_s3 = sync_wrapper(_call_s3)

    async def _prepare(self) -> None:
        """Remove "Expect: 100-continue": botocore waits for its answer without a time limit if the server is silent."""
        client = await self.set_session()
        if client is not self._prepared:
            client.meta.events.unregister("before-call.s3", add_expect_header)
            self._prepared = client


def _patience(seconds: float) -> dict[str, Any]:
    """Return tenacity's options: exponential waits of up to 5 s, and an end after `seconds`."""
    return {
        "stop": stop_after_delay(seconds),
        "wait": wait_random_exponential(multiplier=0.1, max=5),
        "before_sleep": _log_failure,
        "reraise": True,
    }


def is_transient(error: BaseException) -> bool:
    """Return whether the same call may succeed later, because the network or the server failed, not the request."""
    if answer := _answer(error):
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        failed = status >= 500 and status != _NOT_IMPLEMENTED
        return failed or status in (408, 409, 429) or _error_code(error) in _TRANSIENT
    if isinstance(error, (FileNotFoundError, FileExistsError, PermissionError)):
        return False
    if isinstance(error, BotoCoreError):
        return isinstance(error, (HTTPClientError, NoConnectionError, IncompleteReadError))
    return isinstance(error, (OSError, TimeoutError, ResponseParserError, aiohttp.ClientError))


def _answer(error: BaseException) -> dict[str, Any]:
    """Return S3's answer that led to an error; empty if the server did not answer."""
    cause = error if isinstance(error, ClientError) else error.__cause__
    return dict(cause.response) if isinstance(cause, ClientError) else {}


def _error_code(error: BaseException) -> str:
    return str(_answer(error).get("Error", {}).get("Code", ""))


def _log_failure(state: RetryCallState) -> None:
    assert state.outcome is not None
    number = state.attempt_number
    if number >= _FIRST_LOGGED and number & (number - 1) == 0:  # 4, 8, 16 …
        logger.warning("S3: attempt %d failed: %r", number, state.outcome.exception())


class S3Backend:
    """A backend for S3. Credentials and endpoint come from the ordinary AWS chain (environment, profile, instance).

    Args:
        request_timeout_s: a request without an answer for so many seconds is sent again.
        patience_s: how many seconds a call is retried before it fails.
    """

    def __init__(self, request_timeout_s: float, patience_s: float) -> None:
        self._request_timeout_s, self._patience_s = request_timeout_s, patience_s
        self._fs = PatientFileSystem(
            request_timeout_s,
            patience_s,
            use_listings_cache=False,  # cached listings never expire and would hide what others write
            skip_instance_cache=True,  # fsspec's cache ignores that the environment may have changed
        )
        self._bucket_exists = False

    def size(self, path: str) -> int:
        try:
            return int(self._call("head_object", path)["ContentLength"])
        except FileNotFoundError:
            if not self._bucket_exists:  # the answer does not say whether only the object is absent
                self._check_bucket(path.partition("/")[0])
                self._bucket_exists = True
            raise

    def read(self, path: str) -> bytes:
        return bytes(self._patiently(path, lambda: self._fs.cat_file(path, max_concurrency=1)))

    def write(self, path: str, data: bytes) -> None:
        self._call("put_object", path, Body=data)

    def create(self, path: str, data: bytes) -> bool:
        try:  # one PUT, because some servers ignore the condition on multipart uploads
            self._call("put_object", path, Body=data, IfNoneMatch="*")
        except FileExistsError:
            return False
        except OSError as error:
            if _error_code(error) not in _CONFLICT:
                raise
            return False
        return True

    def upload(self, path: str, source: Path) -> None:
        size = source.stat().st_size
        options = {"chunksize": max(PART_BYTES, math.ceil(size / MAX_PARTS)), "max_concurrency": PARTS_AT_ONCE}
        self._patiently(path, lambda: self._fs.put_file(str(source), path, **options), _is_worth_uploading_again)
        if (stored := self.size(path)) != size:
            raise StorageError(f"{self.uri(path)} has {stored} bytes after an upload of {size}: the server lost some")

    def download(self, path: str, target: Path) -> str:
        size, digest = self.size(path), hashlib.sha256()
        with target.open("wb") as file:
            for begin in range(0, size, PARTS_AT_ONCE * PART_BYTES):
                for part in self._parts(path, begin, min(size, begin + PARTS_AT_ONCE * PART_BYTES)):
                    file.write(part)
                    digest.update(part)
        return digest.hexdigest()

    def _parts(self, path: str, begin: int, end: int) -> list[bytes]:
        """Fetch the bytes `begin` to `end` in parallel parts."""
        starts = list(range(begin, end, PART_BYTES))
        ends = [*starts[1:], end]
        paths = [path] * len(starts)
        return self._patiently(path, lambda: list(self._fs.cat_ranges(paths, starts, ends, on_error="raise")))

    def delete(self, path: str) -> None:
        self._call("delete_object", path)

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        for bucket, page in self._pages("list_objects_v2", prefix, ContinuationToken="NextContinuationToken"):
            for entry in page.get("Contents", []):
                yield ObjectInfo(f"{bucket}/{entry['Key']}", int(entry["Size"]), entry["LastModified"].timestamp())

    def uploads(self, prefix: str) -> list[Upload]:
        markers = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        return [
            Upload(f"{bucket}/{entry['Key']}", entry["UploadId"], entry["Initiated"].timestamp())
            for bucket, page in self._pages("list_multipart_uploads", prefix, **markers)
            for entry in page.get("Uploads", [])
        ]

    def _pages(self, method: str, prefix: str, **markers: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """List page by page; `markers` names the argument for the next page that a field of each page holds."""
        bucket, _, start = prefix.partition("/")
        following: dict[str, str] = {}
        while True:
            page = self._call(method, bucket, Prefix=start, **following)
            yield bucket, page
            if not page.get("IsTruncated"):
                return
            following = {argument: page[field] for argument, field in markers.items()}

    def abort_upload(self, upload: Upload) -> None:
        try:
            self._call("abort_multipart_upload", upload.path, UploadId=upload.id)
        except FileNotFoundError as error:
            if _error_code(error) != "NoSuchUpload":  # completed or aborted meanwhile
                raise

    def begin_upload(self, path: str) -> Upload:
        """Begin a multipart upload without sending parts, so that `doctor` can list and abort it."""
        return Upload(path, self._call("create_multipart_upload", path)["UploadId"], time.time())

    def settings(self, method: str, path: str) -> dict[str, Any]:
        """Return the bucket settings that `method` (`get_bucket_versioning` …) reads; empty if there are none."""
        try:
            return self._call(method, path)
        except OSError as error:
            if _error_code(error).endswith(("NotFoundError", "NoSuchLifecycleConfiguration")):
                return {}
            raise

    def another(self, patience_s: float | None = None) -> "S3Backend":
        """Return a backend for the same place with its own connections and, if given, another patience."""
        return S3Backend(self._request_timeout_s, self._patience_s if patience_s is None else patience_s)

    def uri(self, path: str) -> str:
        return f"s3://{path}"

    def _call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        """Send a request; s3fs leaves out `Key` where a method knows none."""
        bucket, _, key = path.partition("/")
        return dict(self._patiently(path, lambda: self._fs.call_s3(method, Bucket=bucket, Key=key, **arguments)))

    def _check_bucket(self, bucket: str) -> None:
        try:
            self._call("head_bucket", bucket)
        except FileNotFoundError as error:
            raise _no_bucket(bucket) from error
        except UnavailableError as error:
            if not isinstance(error.__cause__, PermissionError):  # reads and writes may be allowed all the same
                raise

    def _patiently(
        self,
        path: str,
        attempt: Callable[[], T],
        repeat: Callable[[BaseException], bool] = is_transient,
    ) -> T:
        """Run `attempt`, which may send many requests, and repeat all of it while `repeat` says so of its error."""
        retrying = Retrying(retry=retry_if_exception(repeat), **_patience(self._patience_s))
        try:
            return retrying(attempt)
        except PermissionError as error:
            raise UnavailableError(f"{self.uri(path)}: {error}. {_remedy(error)}") from error
        except FileNotFoundError as error:
            if _error_code(error) == "NoSuchBucket":
                raise _no_bucket(path.partition("/")[0]) from error
            raise
        except Exception as error:
            if is_transient(error):
                raise UnavailableError(
                    f"{self.uri(path)}: no success within {self._patience_s:g} s: {error!r}. "
                    "Committed versions are safe; run the same command again to continue from them"
                ) from error
            if isinstance(error, BotoCoreError):  # no credentials, expired credentials, or no region
                raise UnavailableError(f"{self.uri(path)}: {error}. {_CREDENTIALS}") from error
            raise


def _remedy(refusal: PermissionError) -> str:
    """Say what to do about a refusal; the answer to a HEAD request has no text that would say why, but the time."""
    date = _answer(refusal).get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    ahead_s = time.time() - parsedate_to_datetime(date).timestamp() if date else 0.0
    if abs(ahead_s) < _MOST_CLOCK_ERROR_S:
        return _CREDENTIALS
    return (
        f"The clock of this host is {abs(ahead_s) / 60:.0f} minutes {'ahead of' if ahead_s > 0 else 'behind'} the "
        "server's; S3 refuses what is signed with a wrong time. Set it, and keep it right with NTP"
    )


def _no_bucket(name: str) -> UnavailableError:
    return UnavailableError(f"there is no bucket {name!r}: create it, or correct storage.root")


def _is_worth_uploading_again(error: BaseException) -> bool:
    """Return whether to repeat an upload: after transient errors, and after NoSuchUpload.

    The server answers NoSuchUpload if it completed a multipart upload but its answer was lost.
    """
    return is_transient(error) or _error_code(error) == "NoSuchUpload"
