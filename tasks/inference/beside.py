"""The servers of models beside the policy, which are never trained, with a proof that they hold just these models."""

import asyncio
import json
import logging
import os
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from configs import Config
from configs.models import Role, ServedModel
from storage.errors import first_few
from tasks.inference.api import InferenceError
from tasks.inference.client import LOST, Client
from tasks.inference.devices import deal_beside, visible_devices
from tasks.inference.location import CONFIG, folder_of, identities, identity_of
from tasks.inference.server import Server, bring_in, start_all
from tasks.inference.weight_sums import UNTOLD, differing, sums_of_folder

logger = logging.getLogger(__name__)

_REQUEST_S = 300.0
_ARGUMENTS: dict[Role, list[str]] = {"reward": ["--runner", "pooling"]}
"""What vLLM's servers of a model need besides the arguments of the policy's."""


class BesideModels(AbstractContextManager["BesideModels"]):
    """The servers of the models beside the policy; a context manager that ends those that it started.

    They start when they are first needed.

    Args:
        config: the configuration.
        logs: folder for the servers' logs.
    """

    def __init__(self, config: Config, logs: Path) -> None:
        self._config, self._logs = config, logs
        self._servers: dict[Role, list[Server]] = {}
        self._proven = set[Role]()
        self._serving = threading.Lock()

    def __exit__(self, *_: object) -> None:
        for servers in self._servers.values():
            for server in servers:
                server.close()

    def start(self) -> None:
        """Start and prove all servers now, for errors before anything expensive.

        Raises:
            InferenceError, ValueError, StorageError: see `connect`.
        """
        for role in self._config.models.served():
            self.repair(role)

    @asynccontextmanager
    async def connect(self, role: Role) -> AsyncIterator[list[Client]]:
        """Connect to the servers of a model, which are started and proven at the first time, and when they have died.

        Raises:
            InferenceError: a server does not start or answer, or does not hold this model's weights.
            ValueError, StorageError: see `folder_of`.
        """
        knobs = self._config.models.served()[role]
        await asyncio.to_thread(self.repair, role)
        urls = knobs.urls or [server.url for server in self._servers[role]]
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(self._client(role, knobs, url)) for url in urls]

    def repair(self, role: Role) -> None:
        """Start those servers of a model that are ours and do not live, and prove what they hold; see `connect`."""
        knobs = self._config.models.served()[role]
        with self._serving:
            if not knobs.urls and role not in self._servers:
                dealt = deal_beside(self._config.models, self._config.inference, visible_devices())[role]
                section, arguments = f"models.{role}", _ARGUMENTS.get(role, ())
                self._servers[role] = [
                    Server(knobs, self._logs / f"vllm-{role}-{number}.log", devices, section, arguments)
                    for number, devices in enumerate(dealt)
                ]
            servers = self._servers.get(role, [])
            if knobs.path and (role not in self._proven or any(server.lost() for server in servers)):
                bring_in(servers, partial(self._start, role), partial(self._prove, role, knobs))
                self._proven.add(role)

    def _start(self, role: Role, servers: Sequence[Server]) -> None:
        self._proven.discard(role)
        start_all(servers, folder_of(self._config, role))

    async def _prove(self, role: Role, knobs: ServedModel) -> None:
        """Compare the sums of all weights that servers hold with those of the files.

        Quantised weights are not those of the files: then only our own servers are trusted, which loaded these files.
        """
        folder, expected = folder_of(self._config, role), dict[str, int]()
        quantised = "quantization_config" in json.loads((folder / CONFIG).read_bytes()) and not knobs.urls
        if quantised:
            logger.warning("models.%s: its weights are quantised, so no sums prove what its servers hold", role)
        else:
            expected = await asyncio.to_thread(sums_of_folder, folder, knobs.dtype)
        if await asyncio.to_thread(identity_of, folder) != identities(self._config)[role]:
            raise InferenceError(f"models.{role}: {folder} has changed while it was loaded: begin again")
        for url in knobs.urls or [server.url for server in self._servers[role]]:
            try:
                async with self._client(role, knobs, url) as client:
                    held = expected if quantised else await client.weight_sums()
                    if role != "reward":  # vLLM begins with a version that is no number
                        await client.set_weight_version(0)
            except LOST as error:
                raise InferenceError(f"models.{role}: {url} cannot be reached, or has failed: {error}") from error
            if held is None:
                raise InferenceError(f"models.{role}: {url} {UNTOLD}")
            if wrong := differing(held, expected):
                raise InferenceError(f"models.{role}: {url} holds other weights than {folder} in {first_few(wrong)}")

    def _client(self, role: Role, knobs: ServedModel, url: str) -> Client:
        key = os.environ.get(f"{role.upper()}_API_KEY") if knobs.urls else None
        return Client(url, key, _REQUEST_S, knobs.max_model_len)
