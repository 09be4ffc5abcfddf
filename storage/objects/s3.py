"""Objects in an S3 bucket, through s3fs, with retries.

Every call is safe to repeat. Objects are written whole. A repeated create recognises its own object by the nonce in it
(`storage.objects.store.Store.create`). So each call is retried until it succeeds or `patience_s` seconds have passed.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from botocore.exceptions import BotoCoreError
from tenacity import Retrying, retry_if_exception

from storage.errors import StorageError, UnavailableError
from storage.objects.interface import ObjectInfo, Upload
from storage.objects.retries import PatientFileSystem, clock_error_s, error_code, is_transient, patience

T = TypeVar("T")

PART_BYTES = 16 * 2**20
PARTS_AT_ONCE = 4
"""Parts sent at the same time. An upload takes `PARTS_AT_ONCE * PART_BYTES` of memory, a download twice as much."""
MAX_PARTS = 10_000  # S3's limit for one upload
_MOST_CLOCK_ERROR_S = 600.0
"""S3 refuses requests that were signed more than 15 minutes ago, or that much in the future."""
_CONFLICT = ("PreconditionFailed", "412")
_CREDENTIALS = (
    "Credentials come from the ordinary AWS chain: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile; "
    "`python -m storage doctor` says what they allow"
)


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
            self._check_bucket(path)
            raise

    def read(self, path: str) -> bytes:
        data = self._patiently(path, lambda: self._fs.cat_file(path, max_concurrency=1))
        assert isinstance(data, bytes)
        return data

    def write(self, path: str, data: bytes) -> None:
        self._call("put_object", path, Body=data)

    def create(self, path: str, data: bytes) -> bool:
        try:  # one PUT, because some servers ignore the condition on multipart uploads
            self._call("put_object", path, Body=data, IfNoneMatch="*")
        except FileExistsError:
            return False
        except OSError as error:
            if error_code(error) not in _CONFLICT:
                raise
            return False
        return True

    def upload(self, path: str, source: Path) -> None:
        size = source.stat().st_size
        part = max(PART_BYTES, math.ceil(size / MAX_PARTS))

        def attempt() -> None:
            self._fs.put_file(str(source), path, chunksize=part, max_concurrency=PARTS_AT_ONCE)

        self._patiently(path, attempt, repeat=_is_worth_uploading_again)
        if (stored := self.size(path)) != size:
            raise StorageError(f"{self.uri(path)} has {stored} bytes after an upload of {size}: the server lost some")

    def download(self, path: str, target: Path) -> str:
        size, digest = self.size(path), hashlib.sha256()
        with target.open("wb") as file, ThreadPoolExecutor(1) as keeping:  # writes parts while the next are fetched

            def keep(parts: list[bytes]) -> None:
                for part in parts:
                    file.write(part)
                    digest.update(part)

            kept: Future[None] | None = None
            for begin in range(0, size, PARTS_AT_ONCE * PART_BYTES):
                parts = self._parts(path, begin, min(size, begin + PARTS_AT_ONCE * PART_BYTES))
                if kept:
                    kept.result()
                kept = keeping.submit(keep, parts)
            if kept:
                kept.result()
        return digest.hexdigest()

    def _parts(self, path: str, begin: int, end: int) -> list[bytes]:
        """Fetch the bytes `begin` to `end` in parallel parts."""
        starts = list(range(begin, end, PART_BYTES))
        ends = [*starts[1:], end]

        def attempt() -> list[bytes]:
            return list(self._fs.cat_ranges([path] * len(starts), starts, ends, on_error="raise"))

        return self._patiently(path, attempt)

    def delete(self, path: str) -> None:
        self._call("delete_object", path)

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        bucket, _, start = prefix.partition("/")
        token: dict[str, str] = {}
        while True:
            page = self._patiently(
                prefix,
                lambda more: self._fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=start, **more),
                token,
            )
            for entry in page.get("Contents", []):
                yield ObjectInfo(f"{bucket}/{entry['Key']}", int(entry["Size"]), entry["LastModified"].timestamp())
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def uploads(self, prefix: str) -> list[Upload]:
        bucket, _, start = prefix.partition("/")
        found: list[Upload] = []
        marker: dict[str, str] = {}
        while True:
            page = self._patiently(
                prefix,
                lambda more: self._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=start, **more),
                marker,
            )
            for entry in page.get("Uploads", []):
                found.append(Upload(f"{bucket}/{entry['Key']}", entry["UploadId"], entry["Initiated"].timestamp()))
            if not page.get("IsTruncated"):
                return found
            marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def abort_upload(self, upload: Upload) -> None:
        try:
            self._call("abort_multipart_upload", upload.path, UploadId=upload.id)
        except FileNotFoundError as error:
            if error_code(error) != "NoSuchUpload":  # completed or aborted meanwhile
                raise

    def begin_upload(self, path: str) -> Upload:
        """Begin a multipart upload without sending parts, so that `doctor` can list and abort it."""
        return Upload(path, self._call("create_multipart_upload", path)["UploadId"], time.time())

    def settings(self, method: str, path: str) -> dict[str, Any]:
        """Return the bucket settings that `method` (`get_bucket_versioning` …) reads; empty if there are none."""
        try:
            return self._call(method, path)
        except OSError as error:
            if error_code(error).endswith(("NotFoundError", "NoSuchLifecycleConfiguration")):
                return {}
            raise

    def another(self, patience_s: float | None = None) -> "S3Backend":
        """Return a backend for the same place with its own connections and, if given, another patience."""
        return S3Backend(self._request_timeout_s, self._patience_s if patience_s is None else patience_s)

    def uri(self, path: str) -> str:
        return f"s3://{path}"

    def _call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        bucket, _, key = path.partition("/")
        answer = self._patiently(path, lambda: self._fs.call_s3(method, Bucket=bucket, Key=key, **arguments))
        assert isinstance(answer, dict)
        return answer

    def _check_bucket(self, path: str) -> None:
        """Check once that the bucket exists: the answer for an absent object does not say whether its bucket does."""
        bucket = path.partition("/")[0]
        if not self._bucket_exists:
            try:
                self._patiently(path, lambda: self._fs.call_s3("head_bucket", Bucket=bucket))
            except FileNotFoundError as error:
                raise _no_bucket(bucket) from error
            except UnavailableError as error:
                if not isinstance(error.__cause__, PermissionError):  # reads and writes may be allowed all the same
                    raise
            self._bucket_exists = True

    def _patiently(
        self,
        path: str,
        attempt: Callable[..., T],
        *arguments: Any,
        repeat: Callable[[BaseException], bool] = is_transient,
    ) -> T:
        """Run `attempt`, which may send many requests, and repeat all of it while `repeat` says so of its error."""
        retrying = Retrying(retry=retry_if_exception(repeat), **patience(self._patience_s))
        try:
            return retrying(attempt, *arguments)
        except PermissionError as error:
            raise UnavailableError(f"{self.uri(path)}: {error}. {_remedy(error)}") from error
        except FileNotFoundError as error:
            if error_code(error) == "NoSuchBucket":
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
    """Say what to do about a refusal; the answer to a HEAD request has no text that would say why."""
    ahead_s = clock_error_s(refusal)
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
    return is_transient(error) or error_code(error) == "NoSuchUpload"
