"""vLLM's own metrics, fetched from every server of an engine when this process's metrics are read."""

import asyncio
from collections.abc import Callable, Iterable, Iterator

import aiohttp
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from storage.telemetry.metrics import labelled
from tasks.inference.client import Client

_PREFIX = "vllm:"
"""What the metrics of vLLM's engine begin with; a server's process, Python and HTTP metrics are left out."""


class ServerMetrics(Collector):
    """The metrics of vLLM servers, each with the label `replica`.

    Args:
        clients: makes clients of the servers that run now, in the order of the replicas.
    """

    def __init__(self, clients: Callable[[], Iterable[Client]]) -> None:
        self._clients = clients

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("math_mt_ppo_vllm_up", "1: the vLLM server gave its metrics; 0: not", labels=["replica"])
        for replica, text in enumerate(asyncio.run(_fetch(self._clients()))):
            up.add_metric([str(replica)], text is not None)
            own = (one for one in text_string_to_metric_families(text or "") if one.name.startswith(_PREFIX))
            yield from labelled(own, "replica", str(replica))
        yield up


async def _fetch(clients: Iterable[Client]) -> list[str | None]:
    """Return the text of each server; None if it does not answer."""

    async def fetch(client: Client) -> str | None:
        try:
            async with client:
                return await client.metrics()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

    return await asyncio.gather(*map(fetch, clients))
