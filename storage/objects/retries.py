"""Retries of S3 requests: which errors are retried, for how long, and an s3fs file system that does it."""

import asyncio
import logging
import time
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import s3fs
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError
from botocore.exceptions import ConnectionError as NoConnectionError
from botocore.handlers import add_expect_header
from botocore.parsers import ResponseParserError
from fsspec.asyn import sync_wrapper
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_delay, wait_random_exponential

logger = logging.getLogger(__name__)

FIRST_LOGGED = 4
"""The first failed attempt of a request that is logged; fewer failures are ordinary."""
LONGEST = 10
"""A request is given up after so many request timeouts, even if data still arrive."""

_TRANSIENT = ("SlowDown", "RequestTimeout", "IncompleteBody", "OperationAborted", "ConditionalRequestConflict",
              "BadDigest", "XAmzContentSHA256Mismatch")  # fmt: skip
_NOT_IMPLEMENTED = 501


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
        self._longest_s, self._patience_s = LONGEST * request_timeout_s, patience_s
        self._prepared: Any = None

    async def _call_s3(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        async for attempt in AsyncRetrying(retry=retry_if_exception(is_transient), **patience(self._patience_s)):
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


def patience(seconds: float) -> dict[str, Any]:
    """Return tenacity's options: exponential waits of up to 5 s, and an end after `seconds`."""
    return {
        "stop": stop_after_delay(seconds),
        "wait": wait_random_exponential(multiplier=0.1, max=5),
        "before_sleep": _log_failure,
        "reraise": True,
    }


def is_transient(error: BaseException) -> bool:
    """Return whether the same call may succeed later, because the network or the server failed, not the request."""
    cause = error if isinstance(error, ClientError) else error.__cause__
    if isinstance(cause, ClientError):
        status = cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        failed = status >= 500 and status != _NOT_IMPLEMENTED
        return failed or status in (408, 409, 429) or error_code(error) in _TRANSIENT
    if isinstance(error, (FileNotFoundError, FileExistsError, PermissionError)):
        return False
    if isinstance(error, BotoCoreError):
        return isinstance(error, (HTTPClientError, NoConnectionError, IncompleteReadError))
    return isinstance(error, (OSError, TimeoutError, ResponseParserError, aiohttp.ClientError))


def error_code(error: BaseException) -> str:
    """Return S3's code of the error; empty if the server did not answer."""
    cause = error if isinstance(error, ClientError) else error.__cause__
    return str(cause.response["Error"].get("Code", "")) if isinstance(cause, ClientError) else ""


def clock_error_s(error: BaseException) -> float:
    """Return by how many seconds this host's clock is ahead of the server's, as its answer says; 0 if it says none."""
    cause = error if isinstance(error, ClientError) else error.__cause__
    answer = cause.response.get("ResponseMetadata", {}) if isinstance(cause, ClientError) else {}
    date = answer.get("HTTPHeaders", {}).get("date")
    return time.time() - parsedate_to_datetime(date).timestamp() if date else 0.0


def _log_failure(state: RetryCallState) -> None:
    assert state.outcome is not None
    number = state.attempt_number
    if number >= FIRST_LOGGED and number & (number - 1) == 0:  # 4, 8, 16 …
        logger.warning("S3: attempt %d failed: %r", number, state.outcome.exception())
