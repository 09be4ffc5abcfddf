"""Objects in an S3 bucket, through botocore, with retries.

Every request is safe to repeat. Objects are written whole. A repeated create recognises its own object by the nonce in
it (`storage.objects.store.Store.create`). So each request is repeated until it succeeds or `patience_s` seconds have
passed, and nothing else is: large objects are sent and fetched in parts, of which only the failed ones are repeated.
"""

import hashlib
import logging
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError
from botocore.exceptions import ConnectionError as NoConnectionError
from botocore.parsers import ResponseParserError
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from storage.errors import StorageError, UnavailableError
from storage.objects.interface import ObjectInfo

logger = logging.getLogger(__name__)
_LOGGED = (4, 8, 16, 32, 64, 128)
"""The failed attempts of a request that are logged; fewer failures are ordinary."""
_TRANSIENT = ("SlowDown", "RequestTimeout", "IncompleteBody", "OperationAborted", "ConditionalRequestConflict",
              "BadDigest", "XAmzContentSHA256Mismatch")  # fmt: skip
_NOT_IMPLEMENTED = 501
PART_BYTES = 16 * 2**20
PARTS_AT_ONCE = 4
"""Parts sent or fetched at the same time, which are in memory meanwhile."""
MAX_PARTS = 10_000  # S3's limit for one upload
_MOST_CLOCK_ERROR_S = 600.0
"""S3 refuses requests that were signed more than 15 minutes ago, or that much in the future."""
_CREDENTIALS = (
    "Credentials come from the ordinary AWS chain: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile; "
    "`python -m storage doctor` says what they allow"
)


def is_transient(error: BaseException) -> bool:
    """Return whether the same request may succeed later, because the network or the server failed, not the request."""
    if isinstance(error, ClientError):
        status, code = _status(error), _code(error)
        return (status >= 500 and status != _NOT_IMPLEMENTED) or status in (408, 409, 429) or code in _TRANSIENT
    return isinstance(error, (HTTPClientError, NoConnectionError, IncompleteReadError, ResponseParserError))


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _code(error: BaseException | None) -> str:
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


class S3Backend:
    """A backend for S3. Credentials and endpoint come from the ordinary AWS chain (environment, profile, instance).

    Args:
        request_timeout_s: a request without an answer for so many seconds is sent again.
        patience_s: how many seconds a request is repeated before it fails.
    """

    def __init__(self, request_timeout_s: float, patience_s: float) -> None:
        config = Config(
            connect_timeout=min(10.0, request_timeout_s),
            read_timeout=request_timeout_s,
            retries={"total_max_attempts": 1},
            max_pool_connections=64,
        )
        self._client: Any = botocore.session.get_session().create_client("s3", config=config)
        self._patience_s = patience_s
        self._retrying = Retrying(
            retry=retry_if_exception(is_transient),
            stop=stop_after_delay(patience_s),
            wait=wait_random_exponential(multiplier=0.1, max=5),
            before_sleep=_log_failure,
            reraise=True,
        )

    def size(self, path: str) -> int:
        """Return the size. If the bucket does not exist, so does not the object: the next read or write says why."""
        return int(self._call("head_object", path)["ContentLength"])

    def read(self, path: str) -> bytes:
        return bytes(self._call("get_object", path)["Body"])

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
            if _code(error.__cause__) != "NoSuchUpload":  # it was completed, but the answer was lost
                raise
        if (stored := self.size(path)) != size:
            raise StorageError(f"{self.uri(path)} has {stored} bytes after an upload of {size}: the server lost some")

    def download(self, path: str, target: Path) -> str:
        size, digest = self.size(path), hashlib.sha256()

        def fetch(start: int) -> bytes:
            return bytes(self._call("get_object", path, Range=f"bytes={start}-{start + PART_BYTES - 1}")["Body"])

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
        """Send a request, repeat it after transient errors, and return the answer with its whole body.

        Raises:
            FileNotFoundError, FileExistsError: the answer says so; the cause is botocore's error.
            UnavailableError: no success within `patience_s`, or S3 refuses; then the cause is a PermissionError.
        """
        bucket, _, key = path.partition("/")
        target = {"Bucket": bucket, "Key": key} if key else {"Bucket": bucket}

        def attempt() -> dict[str, Any]:
            answer: dict[str, Any] = getattr(self._client, method)(**target, **arguments)
            return answer | {"Body": answer["Body"].read()} if "Body" in answer else answer

        try:
            return self._retrying(attempt)
        except (ClientError, BotoCoreError, ResponseParserError) as error:
            if is_transient(error):
                raise UnavailableError(
                    f"{self.uri(path)}: no success within {self._patience_s:g} s: {error!r}. "
                    "Committed versions are safe; run the same command again to continue from them"
                ) from error
            if _code(error) == "NoSuchBucket":
                raise UnavailableError(f"there is no bucket {bucket!r}: create it, or correct storage.root") from error
            if isinstance(error, ClientError) and (raised := _ERRORS.get(_status(error))):
                raise raised(f"{self.uri(path)}: {error}") from error
            refusal = PermissionError(str(error))  # no or expired credentials, no region, or what S3 refuses
            raise UnavailableError(f"{self.uri(path)}: {error}. {_remedy(error)}") from refusal


_ERRORS = {404: FileNotFoundError, 412: FileExistsError}


def _log_failure(state: RetryCallState) -> None:
    if state.outcome and state.attempt_number in _LOGGED:
        logger.warning("S3: attempt %d failed: %r", state.attempt_number, state.outcome.exception())


def _remedy(error: BaseException) -> str:
    """Say what to do about a refusal; the answer to a HEAD request has no text that would say why, but the time."""
    answer = error.response.get("ResponseMetadata", {}) if isinstance(error, ClientError) else {}
    date = answer.get("HTTPHeaders", {}).get("date")
    ahead_s = time.time() - parsedate_to_datetime(date).timestamp() if date else 0.0
    if abs(ahead_s) < _MOST_CLOCK_ERROR_S:
        return _CREDENTIALS
    return (
        f"The clock of this host is {abs(ahead_s) / 60:.0f} minutes {'ahead of' if ahead_s > 0 else 'behind'} the "
        "server's; S3 refuses what is signed with a wrong time. Set it, and keep it right with NTP"
    )
