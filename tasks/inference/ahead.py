"""Servers whose processes begin before an engine needs them: nothing in a flow's start takes as long as vLLM's imports.

Until an engine says what they serve, they use neither a GPU nor a policy. So they may begin before a run has its lease.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from configs import Config
from configs.inference import Inference
from storage.versions.checkpoints import Checkpoint
from tasks.inference.api import InferenceError
from tasks.inference.devices import deal, visible_devices

if TYPE_CHECKING:
    from tasks.inference.server import Server

_begun: "list[Server]" = []


@contextlib.contextmanager
def servers_begun(config: Config) -> Iterator[None]:
    """Begin the servers of the engine that this process will open in the block. What it does not take ends with it.

    What prevents them, such as too few GPUs, is left to the engine, which reports it in its turn.
    """
    from tasks.inference.server import Server

    knobs, logs = config.servers, Path(config.storage.cache) / "logs" / config.run.name
    try:
        with contextlib.suppress(InferenceError, OSError):
            if not config.plays_apart and not knobs.urls:
                dealt = deal(visible_devices(), knobs.replicas, knobs.ranks)
                _begun.extend(Server(knobs, logs / f"vllm-{i}.log", devices) for i, devices in enumerate(dealt))
                for server in _begun:
                    server.begin()
        yield
    finally:
        _end_all()


def serve_ahead(open_policy: Callable[[], Checkpoint]) -> None:
    """Let the servers that have begun, if any, load the policy that an engine will serve first; wait for nothing."""
    from tasks.inference.engine import adapter_arguments

    if _begun:
        policy = open_policy()
        for server in _begun:
            server.start_serving(policy.model, adapter_arguments(policy))


def take_servers(settings: Inference) -> "list[Server]":
    """Return the servers that have begun, for an engine, which ends them; if they have other settings, end them."""
    if not all(server.settings == settings for server in _begun):
        _end_all()
    taken = list(_begun)
    _begun.clear()
    return taken


def _end_all() -> None:
    while _begun:
        _begun.pop().close()
