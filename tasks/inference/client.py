"""The HTTP client of one vLLM server, for generation, weight swaps and the data that prove which weights it serves."""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Coroutine, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import orjson
import tenacity
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from storage.records import HIGHEST_LOGPROB
from storage.visible import described, visible, without_secrets
from tasks.inference import api
from tasks.inference.weight_sums import merged

logger = logging.getLogger(__name__)
T = TypeVar("T")

UNIX = "unix://"
"""The beginning of a URL of a server on a Unix socket."""

METRICS_S = 3.0
"""Longest wait for a server's metrics."""
CUT_S = 10.0
"""Longest wait for the answer to a request that was cut."""
SILENT_S = 60.0
"""An engine that answers nothing for so long is taken for dead: it answers between its steps."""
_CHECK_S = 1.0
"""Seconds between two questions whether an engine lives of which an answer is awaited."""
LOST = (aiohttp.ClientError, TimeoutError, ConnectionError)
"""Errors of requests to a server that may have ended."""
_TRANSIENT = (*LOST, api.AbortedError)
_LATER = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
_LARGEST = 2**26
"""Bytes of the largest answer, besides those that grow with its tokens: the sums of a large model's weights."""
_LARGEST_ERROR = 2**16
"""Bytes that are read of an error."""
_LONGEST_SHOWN = 500
"""Characters of an answer in a message."""
_OF_TOKEN, _WITH_EXPERTS = 2**9, 2**12
"""Bytes of an answer for each token, also with the experts of many layers."""


class MalformedError(aiohttp.ClientError):
    """A server's answer cannot be read. Where it answers questions, it costs what was asked, not the stage."""


class FailedError(aiohttp.ClientError):
    """A server failed, or is busy: it is asked again."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


_REFUSALS: dict[int, type[api.InferenceError]] = {
    HTTPStatus.NOT_FOUND: api.NoSuchModelError,
    HTTPStatus.BAD_REQUEST: api.RefusedError,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: api.RefusedError,
    HTTPStatus.UNPROCESSABLE_ENTITY: api.RefusedError,
}


def retrying(attempts: int, *, slow: bool = True) -> tenacity.AsyncRetrying:
    """Return what sends a request again that fails for a reason that may pass, so many times in all.

    Without `slow`, none is sent again that waited for its whole time or was answered: a service may have billed it.
    """
    unbilled = tenacity.retry_if_not_exception_type(() if slow else (asyncio.TimeoutError, MalformedError))
    return tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(_TRANSIENT) & unbilled,
        stop=tenacity.stop_after_attempt(attempts),
        wait=tenacity.wait_exponential(multiplier=0.2, max=20),
        before_sleep=tenacity.before_sleep_log(logger, logging.DEBUG),
        reraise=True,
    )


def connect(url: str) -> tuple[aiohttp.BaseConnector, str]:
    """Return a connector to a server, and the base URL for requests through it; unix:///PATH is a Unix socket.

    aiohttp ignores proxies.
    """
    if url.startswith(UNIX):
        # A connection that does not fit into the server's queue fails immediately; over TCP the kernel retries it.
        queue = int(Path("/proc/sys/net/core/somaxconn").read_text())
        return aiohttp.UnixConnector(url.removeprefix(UNIX), limit=queue), "http://localhost"
    return aiohttp.TCPConnector(limit=0), url.rstrip("/")


class Client:
    """A client of the vLLM server at `url`; an asynchronous context manager.

    It uses aiohttp, because httpx is several times slower with hundreds of requests in flight.

    Whoever answers may be hostile or broken. Redirects are refused, answers that are too long or cannot be read are a
    `MalformedError`, and what is told of answers has none of this process's secrets.

    Args:
        url: base URL, or unix:///PATH.
        api_key: bearer token, or None.
        timeout_s: limit for one request.
        max_model_len: the server's context length, for clear errors.
        longest_s: a completion that takes longer is cut; None: `timeout_s`.
        experts: whether the server returns the experts that it chose, as it must then.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        timeout_s: float,
        max_model_len: int,
        longest_s: float | None = None,
        *,
        experts: bool = False,
    ) -> None:
        self.url, self._base = url, ""
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._longest_s, self._max_model_len, self._experts = longest_s or timeout_s, max_model_len, experts
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> "Client":
        connector, self._base = connect(self.url)
        self._session = aiohttp.ClientSession(headers=self._headers, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def health(self) -> int:
        """Return the status of the server's answer: 200, or 503 if its engine has died; 0 without an answer."""
        try:
            return (await self._send("/health", method="GET"))[0]
        except (*LOST, OSError):
            return 0

    async def answers(self) -> bool:
        """Return whether the engine itself answers, and not only the process that takes its requests."""
        try:
            sending = self._send("/is_sleeping", method="GET")
            return (await self._while_alive(sending, "/is_sleeping"))[0] == HTTPStatus.OK
        except LOST:
            return False

    async def metrics(self) -> list[Metric]:
        """Return what vLLM's engine counts; empty if the server does not answer soon, or answers something else."""
        try:
            _, text = await self._send("/metrics", method="GET", limit_s=METRICS_S)
            with self._reading(text):
                return [each for each in text_string_to_metric_families(text.decode()) if each.name.startswith("vllm:")]
        except (*LOST, OSError):
            return []

    async def generate(
        self, token_ids: list[int], gconfig: api.GenerationConfig, seed: int, adapter: str | None = None
    ) -> list[api.Completion]:
        """Return `gconfig.n` completions; the server samples completion i with seed + i, with the adapter of that name.

        Those that take longer than `longest_s` end there, as they would at the token limit: sampled again with the same
        seed, they would take as long again.

        Raises:
            AbortedError: the server aborted the request, or had sampled nothing of a completion in this time.
            TimeoutError: the server does not answer.
            MalformedError: its answer cannot be read.
            ContextLengthError: the prompt leaves no room in the context.
        """
        if len(token_ids) >= self._max_model_len:
            raise api.ContextLengthError(
                f"prompt of {len(token_ids)} tokens leaves no room in inference.max_model_len={self._max_model_len}"
            )
        limit = min(gconfig.max_new_tokens, self._max_model_len - len(token_ids))
        parameters: dict[str, Any] = {
            **{name: getattr(gconfig, name) for name in ("n", "temperature", "top_p", "top_k", "stop_token_ids")},
            "max_tokens": limit,
            "seed": seed,
            "logprobs": 0,  # of the sampled token only
            "detokenize": bool(gconfig.stop),
            **({"stop": gconfig.stop} if gconfig.stop else {}),
        }
        body = {"token_ids": token_ids, "sampling_params": parameters, **({"model": adapter} if adapter else {})}
        try:
            answer, cut = await self._sample(body, self._most(gconfig.n))
        except api.NoSuchModelError as error:  # it was restarted with a newer adapter, which the next attempt names
            raise api.AbortedError(str(error)) from error
        with self._reading(answer):
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            if len(choices) != gconfig.n:
                raise ValueError(f"{len(choices)} completions, asked for {gconfig.n}")
            for choice in choices:
                if cut and choice["finish_reason"] == "abort" and choice["token_ids"]:
                    choice["finish_reason"] = "length"
            if unfinished := {str(choice["finish_reason"])[:20] for choice in choices} - {"stop", "length"}:
                raise api.AbortedError(f"{self.url} aborted a request: finish_reason={', '.join(unfinished)}")
            experts = [api.experts_of(choice, len(token_ids), cut=cut) if self._experts else b"" for choice in choices]
            return [api.completion_of(choice, limit, of_it) for choice, of_it in zip(choices, experts, strict=True)]

    def _most(self, completions: int) -> int:
        """Return how many bytes an answer may have."""
        return _LARGEST + completions * self._max_model_len * (_WITH_EXPERTS if self._experts else _OF_TOKEN)

    async def _sample(self, body: dict[str, Any], most: int) -> tuple[dict[str, Any], bool]:
        """Return the server's answer to a request for completions, and whether they were cut because of the time."""
        identity = uuid.uuid4().hex
        limits: dict[str, Any] = {"limit_s": self._longest_s + CUT_S, "most": most}
        asked = asyncio.create_task(self._ask("/inference/v1/generate", body | {"request_id": identity}, **limits))
        try:
            done, _ = await asyncio.wait({asked}, timeout=self._longest_s)
            if not done:
                logger.warning("%s: a request took longer than %g s, and is cut", self.url, self._longest_s)
                ids = {"request_ids": [f"generate-tokens-{identity}"]}
                with contextlib.suppress(*LOST, api.InferenceError):  # it ends at its own limit
                    await self._ask("/inference/v1/abort_requests", ids, limit_s=CUT_S)
            return await asked, not done
        finally:
            asked.cancel()

    async def prompt_logprobs(self, token_ids: list[int], adapter: str | None = None) -> list[float]:
        """Return the logprobs of token_ids[1:] at temperature 1, for as many tokens as fit into the context.

        Raises:
            InferenceError: one is above 0.
        """
        token_ids = token_ids[: self._max_model_len - 1]
        parameters = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0, "detokenize": False}
        body = {"token_ids": token_ids, "sampling_params": parameters, **({"model": adapter} if adapter else {})}
        answer = await self._ask("/inference/v1/generate", body, most=self._most(1))
        with self._reading(answer):
            entries = zip(answer["prompt_logprobs"][1:], token_ids[1:], strict=True)
            logprobs = [api.number(entry[str(token)]["logprob"]) for entry, token in entries]
        if max(logprobs, default=0) > HIGHEST_LOGPROB:
            remedy = "is its --logprobs-mode processed_logprobs?"
            raise api.InferenceError(f"{self.url} gave a prompt's token the logprob {max(logprobs)}: {remedy}")
        return logprobs

    async def chat(self, model: str, messages: list[dict[str, str]], fields: Mapping[str, Any]) -> tuple[str, str]:
        """Return what a service with OpenAI's chat completions answers to messages, and why it ended there.

        Of the other `fields` of the request, those that are None are left out.

        Raises:
            RefusedError: it refuses this request.
            InferenceError: it refuses all.
            MalformedError: its answer has another form.
        """
        given = {name: value for name, value in fields.items() if value is not None}
        body = {"model": model, "messages": messages, **given}
        answer = await self._ask("/v1/chat/completions", body, limit_s=self._timeout_s)  # it may know no /health
        with self._reading(answer):
            (choice,) = answer["choices"]
            return without_secrets("" + (choice["message"]["content"] or "")), str(choice.get("finish_reason"))

    async def pooled(self, token_ids: list[int]) -> float:
        """Return the only number that a sequence classifier gives to tokens, as it is before any activation.

        Raises:
            InferenceError: the model gives several numbers, or none.
            MalformedError: what it gives is no number.
        """
        answer = await self._ask("/pooling", {"input": token_ids, "use_activation": False})
        with self._reading(answer):
            numbers = answer["data"][0]["data"]
            if len(numbers) != 1:
                raise api.InferenceError(f"{self.url} gives {len(numbers)} numbers: a reward model has one label")
            return api.number(numbers[0])

    async def weight_sums(self) -> dict[str, int] | None:
        """Return the sum of each weight that the server holds (`tasks.inference.weight_sums`); None if it cannot."""
        ranks = await self._call_workers("weight_sums", {})
        with self._reading(ranks):
            return None if ranks is None else merged(ranks)

    async def weight_version(self) -> str:
        """Return the weight version that the server reports."""
        return str((await self._ask("/weight_info", method="GET")).get("weight_version"))

    async def swap(self, model: Path, version: int, *, erase: bool = False, idle: bool = False) -> None:
        """Load the weights of `model` (an absolute path) in place and label them `version`.

        Requests in flight go on with the new weights, which process their tokens so far again. With `erase`, the server
        first sets all parameters to 0, so that correct values afterwards prove the load. If it is known to be `idle`
        until this returns, it is not paused, which takes vLLM 20 ms.
        """
        if not idle:
            await self._ask("/pause?mode=keep")
        if erase:
            await self._ask("/weight_checker", {"action": "reset"})
        await self._reload(model, version)
        if not idle:
            await self._ask("/resume")

    async def _reload(self, model: Path, version: int) -> None:
        where = {"weights_path": str(model)}
        if await self._call_workers("reload_policy", where) is None:
            await self._ask("/collective_rpc", {"method": "reload_weights", "kwargs": where})
        reset, _ = await asyncio.gather(
            self._ask("/reset_prefix_cache?reset_running_requests=true"), self.set_weight_version(version)
        )
        if not reset.get("success"):
            raise api.InferenceError(f"{self.url} keeps the key-value cache of older weights: restart the server")

    async def set_weight_version(self, version: int) -> None:
        await self._ask("/update_weight_version", {"new_version": str(version)})

    async def _call_workers(self, method: str, arguments: dict[str, str]) -> Any:
        """Return each worker's answer of a method of `tasks.inference.worker`; None if it fails or workers lack it."""
        try:
            return (await self._ask("/collective_rpc", {"method": method, "kwargs": arguments})).get("results")
        except FailedError as error:
            if error.status != HTTPStatus.INTERNAL_SERVER_ERROR:
                raise
            return None

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load the adapter in `folder` (an absolute path) under a name. Requests in flight are not touched.

        A server that has the name already, such as one of the user's, reads the folder again.

        Raises:
            InferenceError: the server takes no adapters, or not this one.
        """
        body = {"lora_name": name, "lora_path": str(folder)}
        unload, load = "/v1/unload_lora_adapter", "/v1/load_lora_adapter"
        await self._while_alive(self._send(unload, body), unload)  # an error: it has none of this name
        status, text = await self._while_alive(self._send(load, body), load)
        if status != HTTPStatus.OK:
            raise api.InferenceError(
                f"{self.url} does not load the adapter in {folder}. A server of yours needs --enable-lora, "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --max-lora-rank of policy.lora.rank or more, and "
                f"--lora-target-modules with the names in policy.lora.targets. It answered {status}: {shown(text)}"
            )

    async def _ask(
        self, path: str, body: dict[str, Any] | None = None, *, limit_s: float | None = None, **how: Any
    ) -> dict[str, Any]:
        """Return the JSON of an answer; raise FailedError for status 5xx, InferenceError for others (not retried).

        A request without `limit_s` ends when the engine dies. Redirects are refused: they could lead problems,
        solutions and the key anywhere.
        """
        sending = self._send(path, body, limit_s=limit_s, **how)
        status, text = await (sending if limit_s else self._while_alive(sending, path))
        if status >= HTTPStatus.MULTIPLE_CHOICES:
            message = f"{path.partition('?')[0]} answered {status}: {shown(text)}"
            if status < HTTPStatus.BAD_REQUEST:
                message = f"{self.url} redirects, which is not followed: give the URL that answers itself"
            if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _LATER:
                raise FailedError(status, message)
            raise _REFUSALS.get(status, api.InferenceError)(message)
        with self._reading(text):
            return {**orjson.loads(text)}  # several times faster than json; refuses NaN and half emojis

    async def _while_alive(self, sending: Coroutine[Any, Any, T], path: str) -> T:
        """Await an answer for as long as the engine lives, which `/health` says: vLLM leaves some without an answer.

        Raises:
            ConnectionError: the engine has died.
        """
        asked = asyncio.create_task(sending)
        try:
            while not (await asyncio.wait({asked}, timeout=_CHECK_S))[0]:
                if await self.health() in (0, HTTPStatus.SERVICE_UNAVAILABLE):
                    raise ConnectionError(f"the engine of {self.url} has died before it answered {path}")
            return await asked
        finally:
            asked.cancel()

    async def _send(
        self, path: str, body: Any = None, *, method: str = "POST", limit_s: float | None = None, most: int = 0
    ) -> tuple[int, bytes]:
        """Return status and body of the answer to a request, and of an error's body the beginning.

        Raises:
            MalformedError: it is no HTTP, does not end, or has more than `most` bytes (0: `_LARGEST`).
            TimeoutError: nothing came in time.
        """
        limit_s, begun = limit_s or self._timeout_s, False
        how: dict[str, Any] = {"json": body, "timeout": aiohttp.ClientTimeout(limit_s), "allow_redirects": False}
        try:
            async with self._session.request(method, f"{self._base}{path}", **how) as response:
                begun = True
                most = (most or _LARGEST) if response.ok else _LARGEST_ERROR
                try:  # decompressed, a part at a time
                    beginning = await response.content.readexactly(most + 1)
                except asyncio.IncompleteReadError as whole:
                    return response.status, whole.partial
                if response.ok:
                    message = f"{self.url} gave an answer of more than {most:,} bytes, which nothing asked for has"
                    raise MalformedError(message)
                return response.status, beginning
        except TimeoutError:  # aiohttp's has no words
            if begun:
                raise MalformedError(f"{self.url} began an answer that did not end in time") from None
            raise TimeoutError(f"{self.url} has not answered {method} {path} within {limit_s:g} s") from None
        except aiohttp.ClientResponseError as error:
            raise MalformedError(f"the answer of {self.url} is no HTTP: {described(error, _LONGEST_SHOWN)}") from None

    @contextlib.contextmanager
    def _reading(self, answer: object) -> Iterator[None]:
        """Turn the errors of code that reads an answer into one that tells it."""
        try:
            yield
        except (AttributeError, LookupError, MemoryError, OverflowError, TypeError, ValueError) as error:
            why = described(error, _LONGEST_SHOWN)
            raise MalformedError(f"{self.url} gave an answer that cannot be read ({why}): {shown(answer)}") from None


def shown(answer: object) -> str:
    """Return the beginning of an answer for a message."""
    text = answer[:_LARGEST_ERROR].decode(errors="replace") if isinstance(answer, bytes) else str(answer)
    return visible(without_secrets(text[:_LARGEST_ERROR].replace("\\/", "/")), _LONGEST_SHOWN)  # JSON may escape it
