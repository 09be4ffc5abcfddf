"""The engine: one or more vLLM replicas, with a proof that each serves exactly the requested checkpoint.

A policy may be an adapter of another checkpoint's weights. Then a server is started with these, the base, and loads the
adapter of each policy version under a name of its own. Requests name it, and those in flight keep the former one to
their end. So the name says which version sampled a token, and the weight version that the server reports is that of the
base. No request names the base alone: in a batch with requests of adapters, vLLM's CPU backend would answer it with one
of these (lora_index -1 reads the last of its slots).
"""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.registry import Collector

from configs.inference import RETURN_EXPERTS, Inference
from configs.rollout import Rollout
from storage.processes.limits import allow_open_files
from storage.telemetry.metrics import REGISTRY, labelled
from storage.telemetry.spans import span
from storage.versions.checkpoints import Checkpoint
from storage.versions.model_files import read_adapter
from tasks.inference.ahead import take_servers
from tasks.inference.api import Completion, EngineClosedError, GenerationConfig, InferenceError
from tasks.inference.client import LOST, Client, retrying
from tasks.inference.devices import deal, visible_devices
from tasks.inference.proof import Proof, Proven, adapter_name, holds_base
from tasks.inference.server import Server, bring_in, start_all
from tasks.inference.weight_sums import sums_of_folder

REQUEST_TIMEOUT_S = 300.0
"""Longest wait for an answer that samples nothing, such as that of a swap; completions have `longest_completion_s`."""
RETRIES = 5
"""Number of times that a failed request is sent again."""
_ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's --max-lora-rank."""


@dataclass
class _Replica:
    url: str
    server: Server | None  # None if the configuration gives the URL
    proven: Proven | None = None  # what it serves; None if unknown


class Engine(Collector):
    """The vLLM replicas; a context manager that ends the servers it started, however the block ends.

    Args:
        settings: `inference` of the configuration.
        rollout: `rollout` of the configuration, for its request limits.
        logs: folder for the servers' logs.

    Raises:
        InferenceError: this machine has fewer GPUs than the servers need.
    """

    def __init__(self, settings: Inference, rollout: Rollout, logs: Path) -> None:
        self.settings, self.rollout, self._logs = settings, rollout, logs
        self._devices = [] if settings.urls else deal(visible_devices(), settings.replicas, settings.ranks)
        """The GPUs of each server that it starts."""
        self._replicas: list[_Replica] = []
        self._policy: Checkpoint | None = None
        self.served: Checkpoint | None = None
        """The policy that requests ask for: during a swap still the one before."""
        self.history: list[int] = []
        """Weight versions in the order in which they were served."""
        self._settled = 0  # index in the history of the oldest version that answers may contain
        self._serving = threading.RLock()  # a rollout may begin during a swap to newly trained weights
        self._use = threading.Condition()  # guards the next two
        self._connections = 0
        self._idle_swap = False
        """True during a swap that began without connections; a new connection waits for its end."""
        self.closed = False
        allow_open_files()

    def __enter__(self) -> "Engine":
        REGISTRY.register(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True  # a rollout that still plays gets EngineClosedError
        for server in self.servers:
            server.close()
        REGISTRY.unregister(self)

    @property
    def servers(self) -> list[Server]:
        """The servers that this engine has started itself."""
        return [replica.server for replica in self._replicas if replica.server]

    def serves(self, version: str) -> bool:
        """Return whether every replica is proven to serve a version."""
        return bool(self._policy and self._policy.version == version and self.served == self._policy)

    def serve(self, policy: Checkpoint) -> None:
        """Make every replica serve `policy`; start the servers at the first call.

        Requests in flight go on with the new weights.

        Raises:
            InferenceError: a server does not start, or its logprobs of the canary differ from the checkpoint's.
        """
        with self._serving, self._swapping():
            if self._policy and self._policy.version == policy.version:
                return
            self._policy = policy
            self.history.append(policy.number)
            try:
                first = not self._replicas
                if first:
                    servers = take_servers(self.settings) or [
                        Server(self.settings, self._logs / f"vllm-{i}.log", devices)
                        for i, devices in enumerate(self._devices)
                    ]
                    own = [_Replica(server.url, server) for server in servers]
                    # Set before the first process exists, so that __exit__ ends all of them.
                    self._replicas = own or [_Replica(url, None) for url in self.settings.urls]
                adapted = adapter_arguments(policy)
                self._restart(policy, [each for each in self.servers if first or each.adapted != adapted])
                bring_in(self.servers, partial(self._restart, policy), partial(self._establish, self._replicas, policy))
            except BaseException as error:
                self._policy = None  # it is not proven, so it does not count as served
                self.closed = self.closed or not isinstance(error, Exception)  # interrupted: the flow ends
                for server in self.servers:  # its weights may be a mixture of versions; the next call restarts it
                    server.stop()
                raise
            self.served = policy
            self._settled = len(self.history) - 1

    @asynccontextmanager
    async def connect(self) -> AsyncIterator["Connection"]:
        """Connect clients to all replicas, for one event loop."""
        assert self._policy is not None, "serve a policy first"
        await asyncio.to_thread(self._enter)
        try:
            async with self._clients() as clients:
                yield Connection(self, clients, since=self._settled)
        finally:
            with self._use:
                self._connections -= 1

    def _enter(self) -> None:
        with self._use:
            self._use.wait_for(lambda: not self._idle_swap)
            self._connections += 1

    @contextmanager
    def _swapping(self) -> Iterator[None]:
        with self._use:
            self._idle_swap = not self._connections
        try:
            yield
        finally:
            with self._use:
                self._idle_swap = False
                self._use.notify_all()

    @asynccontextmanager
    async def _clients(self) -> AsyncIterator[list[Client]]:
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(self._client(replica)) for replica in self._replicas]

    def collect(self) -> Iterator[Metric]:
        """Yield vLLM's own metrics of the servers that answer, with the label `replica`, when Prometheus asks."""

        async def ask() -> list[list[Metric]]:
            async with self._clients() as clients:
                return await asyncio.gather(*(client.metrics() for client in clients))

        for replica, metrics in enumerate(asyncio.run(ask())):
            yield from labelled(metrics, "replica", str(replica))

    def repair(self, index: int) -> None:
        """Restart a server of this engine with the current policy, if it has died, or its engine's process.

        Raises:
            EngineClosedError: the engine was closed meanwhile.
            InferenceError: the engine serves no policy.
        """
        replica = self._replicas[index]
        with self._serving:
            if self.closed:
                raise EngineClosedError("the engine was closed while a rollout was playing")
            if self._policy is None:
                raise InferenceError(f"{replica.url} serves no policy any more: the swap to new weights failed")
            if (server := replica.server) and server.lost():
                establish = partial(self._establish, [replica], self._policy)
                bring_in([server], partial(self._restart, self._policy), establish)

    def _restart(self, policy: Checkpoint, servers: Sequence[Server]) -> None:
        for replica in self._replicas:
            if replica.server in servers:
                replica.proven = None
        if self.closed:  # by another thread, after which no server starts
            raise EngineClosedError("the engine was closed while a server was starting")
        start_all(servers, policy.model, adapter_arguments(policy))

    def _client(self, replica: _Replica) -> Client:
        key = None if replica.server else os.environ.get("VLLM_API_KEY")
        longest_s = self.rollout.longest_completion_s
        experts = RETURN_EXPERTS in self.settings.extra_args
        return Client(replica.url, key, REQUEST_TIMEOUT_S, self.settings.max_model_len, longest_s, experts=experts)

    async def _establish(self, replicas: Sequence[_Replica], policy: Checkpoint) -> None:
        """Swap the weights in and prove them, on all replicas at the same time."""
        sums = None
        if not all(holds_base(replica.proven, policy) for replica in replicas):
            sums = asyncio.create_task(asyncio.to_thread(sums_of_folder, policy.model, self.settings.dtype))
        await asyncio.gather(*(self._swap(replica, policy, sums) for replica in replicas))

    async def _swap(self, replica: _Replica, policy: Checkpoint, sums: Awaitable[dict[str, int]] | None) -> None:
        before, replica.proven = replica.proven, None
        try:
            async with self._client(replica) as client:
                if not holds_base(before, policy):
                    # A first swap erases what the server holds, so that it shows whether a reload is complete.
                    idle = self._idle_swap and replica.server is not None  # others may use servers that are not ours
                    await client.swap(policy.model.resolve(), policy.base_number, erase=before is None, idle=idle)
                if policy.adapter and (name := adapter_name(policy)):
                    await client.load_adapter(name, policy.adapter.absolute())
                replica.proven = await Proof(client, policy, before, self.settings.tolerance, sums).demand()
        except LOST as error:
            cause = f"vLLM at {replica.url} cannot be reached, or has failed: {error}"
            raise InferenceError(f"{cause}. Its log says why; once it serves, the same command continues") from error


def adapter_arguments(policy: Checkpoint) -> list[str]:
    """Return the arguments of a server for a policy and for others with an adapter of its kind; none without one.

    Two adapters fit into a batch: the newest, and the one before for requests in flight. Layers without an adapter
    are left as they are. The output layer must be: with an adapter for it, which vLLM makes by default, its CPU backend
    ends when prompt logprobs are asked of several prompts at once.
    """
    if policy.adapter is None:
        return []
    lora = read_adapter(policy.adapter)
    rank = next(each for each in _ADAPTER_RANKS if each >= lora.rank)
    return ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "2", "--lora-target-modules", *lora.targets]


class Connection:
    """The engine in one event loop; it is the collector's `Generator`."""

    def __init__(self, engine: Engine, clients: list[Client], since: int) -> None:
        self._engine, self.clients, self._since = engine, clients, since
        self._repairs = [asyncio.Lock() for _ in clients]  # one caller repairs, the others wait
        self._retrying = retrying(RETRIES + 1)

    @property
    def replicas(self) -> int:
        return len(self.clients)

    async def generate(
        self, token_ids: list[int], gconfig: GenerationConfig, seed: int, replica: int
    ) -> list[Completion]:
        """Return completions (see `Generator`). A failed request is retried, after a restart of a dead server.

        Raises:
            InferenceError: the server refused the request, or answered with another weight version.
            ClientError (of aiohttp), TimeoutError, ConnectionError, AbortedError: the last attempt failed, too.
        """
        completions, policy = list[Completion](), self._engine.served
        with span("generate", replica=replica, prompt_tokens=len(token_ids), n=gconfig.n):
            async for attempt in self._retrying.copy():
                with attempt:
                    if attempt.retry_state.attempt_number > 1 or self._engine.closed:
                        async with self._repairs[replica]:
                            await asyncio.to_thread(self._engine.repair, replica)
                    policy = self._engine.served
                    adapter = adapter_name(policy) if policy else None
                    completions = await self.clients[replica].generate(token_ids, gconfig, seed, adapter)
        answered = {version for completion in completions for version in completion.versions}
        served = set(self._engine.history[self._since :])  # a swap may happen during a rollout
        if policy and policy.adapter:  # the name of the adapter says which version sampled, the server reports the base
            served = {policy.base_number}
            completions = [replace(each, versions=[policy.number] * len(each.versions)) for each in completions]
        if others := answered - served:
            url, expected = self.clients[replica].url, ", ".join(map(str, sorted(served)))
            raise InferenceError(f"{url} answered with weight version {sorted(others)}, asked for {expected}")
        return completions
