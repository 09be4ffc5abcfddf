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
        for replica, families in enumerate(asyncio.run(_fetch(self._clients()))):
            up.add_metric([str(replica)], families is not None)
            own = (family for family in families or () if family.name.startswith(_PREFIX))
            yield from labelled(own, "replica", str(replica))
        yield up


async def _fetch(clients: Iterable[Client]) -> list[list[Metric] | None]:
    """Return the metrics of each server; None if it does not answer, or with something else."""

    async def fetch(client: Client) -> list[Metric] | None:
        try:
            async with client:
                return list(text_string_to_metric_families(await client.metrics()))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None

    return await asyncio.gather(*map(fetch, clients))
