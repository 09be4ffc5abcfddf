"""Servers whose processes begin before an engine needs them: nothing in a flow's start takes as long as vLLM's imports.

Until an engine says what they serve, they use neither a GPU nor a policy. So they may begin before a run has its lease.
"""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from configs.inference import Inference
from tasks.inference.api import InferenceError
from tasks.inference.devices import deal, devices_of_a_server, visible_devices
from tasks.inference.server import Server

_begun: list[Server] = []


@contextmanager
def servers_begun(settings: Inference, logs: Path) -> Iterator[None]:
    """Begin the servers of an engine that serves in the block. What it has not taken ends with the block.

    What prevents them, such as too few GPUs, is left to the engine, which reports it in its turn.
    """
    try:
        with contextlib.suppress(InferenceError, OSError):
            size = devices_of_a_server(settings.extra_args)
            for index, devices in enumerate(deal(visible_devices(), settings.replicas, size)):
                _begun.append(Server(settings, logs / f"vllm-{index}.log", devices))
                _begun[-1].begin()
        yield
    finally:
        while _begun:
            _begun.pop().close()


def take_servers(settings: Inference) -> list[Server]:
    """Return the servers that have begun, for an engine with these settings, which ends them; none if others have."""
    servers = list(_begun)
    _begun.clear()
    if len(servers) == settings.replicas and all(server.settings == settings for server in servers):
        return servers
    for server in servers:
        server.close()
    return []
