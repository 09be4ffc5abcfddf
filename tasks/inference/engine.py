"""The engine: one or more vLLM replicas that serve exactly the checkpoint asked for, and prove it."""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import aiohttp
from tenacity import AsyncRetrying, before_sleep_log, retry_if_exception_type, stop_after_attempt, wait_exponential

from configs.schema import Inference, Rollout
from storage import layout
from storage.versions.checkpoints import Checkpoint
from tasks.inference.api import AbortedError, Completion, EngineClosedError, GenerationConfig, InferenceError
from tasks.inference.client import Client
from tasks.inference.devices import deal, devices_of_a_server, visible_devices
from tasks.inference.proof import Proof, Proven
from tasks.inference.server import Server
from tasks.limits import sockets

logger = logging.getLogger(__name__)

_TRANSIENT = (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError, AbortedError)


@dataclass
class _Replica:
    url: str
    api_key: str | None
    server: Server | None  # None where the URL was given
    proven: Proven | None = None  # what it serves; None where that is not known


class Engine:
    """A context manager that ends the servers it started, however the block is left.

    Args:
        settings: the configuration's `inference`.
        rollout: its request limits.
        logs: folder for the servers' logs.

    Raises:
        InferenceError: this machine has fewer GPUs than the servers need.
    """

    def __init__(self, settings: Inference, rollout: Rollout, logs: Path) -> None:
        self.settings, self.rollout, self._logs = settings, rollout, logs
        self._devices = [] if settings.urls else _deal_devices(settings)  # of each server that it starts
        self._replicas: list[_Replica] = []
        self._policy: Checkpoint | None = None
        self._history: list[int] = []
        """Weight versions in the order in which they were served."""
        self._settled = 0  # place in the history from which on answers may come
        self._serving = threading.RLock()  # a rollout may begin while the trainer hands over new weights
        self.closed = False
        self._sockets = _lacking_sockets(rollout.concurrency)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closed = True  # whoever still plays hears of it at the next request
        for server in self.servers:
            server.close()

    @property
    def servers(self) -> list[Server]:
        """The servers that this engine started itself."""
        return [replica.server for replica in self._replicas if replica.server]

    def forget(self) -> None:
        """Somebody else may have swapped the weights: the next `serve` swaps and proves them again."""
        with self._serving:
            self._policy = None
            for replica in self._replicas:
                replica.proven = None

    def serve(self, policy: Checkpoint, *, or_newer: bool = False) -> None:
        """Make every replica serve `policy`, starting servers at the first call.

        Requests in flight are kept and go on with the new weights. With `or_newer` a newer version of the same run
        that is served already stays.

        Raises:
            InferenceError: a server does not start, or its logprobs of the canary are not the checkpoint's.
        """
        with self._serving:
            served = self._policy
            if served is not None and (served.version == policy.version or (or_newer and _is_newer(served, policy))):
                return
            self._serve(policy)

    def _serve(self, policy: Checkpoint) -> None:
        self._policy = policy
        self._history.append(policy.number)
        try:
            self._bring_in(policy)
        except BaseException as error:
            self._policy = None  # not proven: nobody may take it for served
            self.closed = self.closed or not isinstance(error, Exception)  # interrupted: the flow ends
            for server in self.servers:  # its weights may be half of each; the next call starts it anew
                server.stop()
            asyncio.run(self._give_up())
            raise
        self._settled = len(self._history) - 1

    def _bring_in(self, policy: Checkpoint) -> None:
        if not self._replicas:
            self._replicas = self._given() if self.settings.urls else self._start(policy)
        elif self.settings.swap == "restart":
            self._restart(self._replicas, policy)
        else:
            self._restart(
                [replica for replica in self._replicas if replica.server and not replica.server.alive], policy
            )
        asyncio.run(self._establish_all(policy))

    @asynccontextmanager
    async def connect(self) -> AsyncIterator["Connection"]:
        """Clients of all replicas, for one event loop."""
        assert self._policy is not None, "serve a policy first"
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(self._client(replica)) for replica in self._replicas]
            yield Connection(self, clients, since=self._settled)

    def served(self, since: int) -> set[int]:
        """Weight versions served from place `since` in the history on; they may be swapped while one plays."""
        return set(self._history[since:])

    async def repair(self, index: int) -> None:
        """Start a dead server of our own anew with the current policy.

        Raises:
            EngineClosedError: the engine was closed meanwhile.
            InferenceError: it serves no policy.
        """
        await asyncio.to_thread(self._repair, self._replicas[index])

    def _repair(self, replica: _Replica) -> None:
        with self._serving:
            if self.closed:
                raise EngineClosedError("the engine was closed while a rollout was playing")
            if self._policy is None:
                raise InferenceError(f"{replica.url} serves no policy any more: new weights could not be swapped in")
            if replica.server is None or replica.server.alive:
                return
            logger.warning("vLLM at %s has died: starting it anew", replica.url)
            self._restart([replica], self._policy)
            asyncio.run(self._establish(replica, self._policy))

    def _given(self) -> list[_Replica]:
        key = os.environ.get("VLLM_API_KEY")
        return [_Replica(url, key, None) for url in self.settings.urls]

    def _start(self, policy: Checkpoint) -> list[_Replica]:
        logger.info("starting %d vLLM server(s); logs in %s", len(self._devices), self._logs)
        servers = [Server(self.settings, self._logs / f"vllm-{i}.log", own) for i, own in enumerate(self._devices)]
        # Known to __exit__ before the first process exists.
        self._replicas = [_Replica(server.url, None, server) for server in servers]
        self._restart(self._replicas, policy)
        return self._replicas

    def _restart(self, replicas: list[_Replica], policy: Checkpoint) -> None:
        servers = [replica.server for replica in replicas if replica.server]
        for replica in replicas:
            replica.proven = None
        for server in servers:
            server.stop()
            server.start(policy.model)
            if self.closed:  # by another thread, which did not see this server
                server.stop()
                raise EngineClosedError("the engine was closed while a server was starting")
        for server in servers:
            server.wait_until_healthy()

    def _client(self, replica: _Replica) -> Client:
        share = self._sockets and max(1, self._sockets // len(self._replicas))
        return Client(replica.url, replica.api_key, self.rollout.request_timeout_s, self.settings.max_model_len, share)

    async def _establish_all(self, policy: Checkpoint) -> None:
        await asyncio.gather(*(self._establish(replica, policy) for replica in self._replicas))

    async def _give_up(self) -> None:
        """Servers that are not ours cannot be stopped: nobody waits for them, or takes their weights for a policy's."""
        for replica in self._replicas:
            if not replica.server:
                replica.proven = None
                async with self._client(replica) as client:
                    await client.give_up()

    async def _establish(self, replica: _Replica, policy: Checkpoint) -> None:
        """Swap the weights in and prove them."""
        before, replica.proven = replica.proven, None
        try:
            async with self._client(replica) as client:
                proof = Proof(client, policy, before, self.settings.canary_tolerance)
                if self.settings.swap == "restart":
                    await client.set_weight_version(policy.number)
                else:
                    await proof.prepare()
                    unknown = replica.server is None and before is None  # our own has just started from the folder
                    await client.swap(policy.model.absolute(), policy.number, erase=unknown)
                replica.proven = await proof.demand()
        except aiohttp.ClientError as error:
            raise InferenceError(f"vLLM at {replica.url} cannot be reached: {error}") from error


def _lacking_sockets(wanted: int) -> int:
    """How many sockets there may be, where these are fewer than `wanted`; else 0."""
    found = sockets(wanted)
    if found == wanted:
        return 0
    logger.warning(
        "rollout.concurrency=%d, but the hard limit of open files (`ulimit -Hn`) leaves %d connections: others wait",
        wanted,
        found,
    )
    return found


def _is_newer(served: Checkpoint, policy: Checkpoint) -> bool:
    """Whether both are of one run, and the one served came later."""
    return layout.series_of(served.version) == layout.series_of(policy.version) and served.number > policy.number


def _deal_devices(settings: Inference) -> list[list[str]]:
    return deal(visible_devices(), settings.replicas, devices_of_a_server(settings.extra_args))


class Connection:
    """The engine within one event loop; the collector's `Generator`."""

    def __init__(self, engine: Engine, clients: list[Client], since: int) -> None:
        self._engine, self._clients, self._since = engine, clients, since
        self._repairs = [asyncio.Lock() for _ in clients]  # one caller repairs, the others wait
        attempts = engine.rollout.request_retries + 1
        self._retrying = AsyncRetrying(
            retry=retry_if_exception_type(_TRANSIENT),
            stop=stop_after_attempt(attempts),
            wait=wait_exponential(multiplier=0.2, max=10),
            before_sleep=before_sleep_log(logger, logging.DEBUG),
            reraise=True,
        )

    @property
    def replicas(self) -> int:
        return len(self._clients)

    async def generate(
        self, token_ids: list[int], gconfig: GenerationConfig, seed: int, replica: int
    ) -> list[Completion]:
        """See `Generator`. A failed request is sent again, to a restarted server where it had died.

        Raises:
            InferenceError: refused, or another weight version answered.
        """
        completions: list[Completion] = []
        async for attempt in self._retrying.copy():
            with attempt:
                if attempt.retry_state.attempt_number > 1 or self._engine.closed:
                    async with self._repairs[replica]:
                        await self._engine.repair(replica)
                completions = await self._clients[replica].generate(token_ids, gconfig, seed)
        self._check_versions(completions, replica)
        return completions

    def _check_versions(self, completions: list[Completion], replica: int) -> None:
        answered = {version for completion in completions for version in completion.versions}
        served = self._engine.served(self._since)
        if others := answered - served:
            url, asked = self._clients[replica].url, ", ".join(map(str, sorted(served)))
            raise InferenceError(f"{url} answered with weight version {sorted(others)}, asked for {asked}")
