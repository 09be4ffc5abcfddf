"""Which requests to S3 are sent again, for how long; and a file system of s3fs that does so."""

import asyncio
import logging
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

FIRST_TOLD = 4
"""Fewer failures of a request are ordinary and not logged."""
LONGEST = 10
"""Request timeouts after which a request is given up though something may still come."""

_TRANSIENT = ("SlowDown", "RequestTimeout", "IncompleteBody", "OperationAborted", "ConditionalRequestConflict",
              "BadDigest", "XAmzContentSHA256Mismatch")  # fmt: skip
_NOT_IMPLEMENTED = 501


class PatientFileSystem(s3fs.S3FileSystem):  # type: ignore[misc]  # s3fs has no types
    """Repeats each request by itself: of an upload in many parts only the part that failed is sent again.

    Args:
        request_timeout_s: silence after which a request is sent again.
        patience_s: how long that is done.
        options: s3fs's own.
    """

    retries = 1  # s3fs would multiply ours

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
        """No "Expect: 100-continue": the wait for that answer has no time limit, and a silent server would hang us."""
        client = await self.set_session()
        if client is not self._prepared:
            client.meta.events.unregister("before-call.s3", add_expect_header)
            self._prepared = client


def patience(seconds: float) -> dict[str, Any]:
    """How tenacity waits and gives up."""
    return {
        "stop": stop_after_delay(seconds),
        "wait": wait_random_exponential(multiplier=0.1, max=5),
        "before_sleep": _tell,
        "reraise": True,
    }


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed later: the network or the server failed, not the request."""
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
    """S3's name of the error, empty where the server did not answer."""
    cause = error if isinstance(error, ClientError) else error.__cause__
    return str(cause.response["Error"].get("Code", "")) if isinstance(cause, ClientError) else ""


def _tell(state: RetryCallState) -> None:
    assert state.outcome is not None
    number = state.attempt_number
    if number >= FIRST_TOLD and number & (number - 1) == 0:  # 4, 8, 16 …
        logger.warning("S3: attempt %d failed: %r", number, state.outcome.exception())
