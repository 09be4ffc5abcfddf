"""The endpoint `/metrics`, for Prometheus on the same machine: an address of the loopback interface, without password.

Every user of the machine can read it. It answers one connection at a time, so that nobody takes more than one file of
this process, and a slow reader delays other readers only.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Metric, make_wsgi_app
from prometheus_client.registry import Collector

from storage.telemetry.metrics import REGISTRY, labelled

logger = logging.getLogger(__name__)
SILENCE_S = 5.0
"""A connection on which nothing is received for so long is closed."""
_serving = threading.Lock()


class _OfRun(Collector):
    """The metrics of this process, with the label `run`; servers and workers may each have a metric of one name."""

    def __init__(self, run: str) -> None:
        self._run = run

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for metric in labelled(REGISTRY.collect(), "run", self._run):
            family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            family.samples += metric.samples
        yield from families.values()


class _Handler(WSGIRequestHandler):
    timeout = SILENCE_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # the name of the overridden method's
        """Log nothing: a scrape every few seconds is no news."""


@contextmanager
def serving(address: str | None, run: str) -> Iterator[str | None]:
    """Serve this process's metrics, each with the label `run`, until the block ends; yield their URL.

    Does nothing without an address, or if an outer block serves them already. A port that is taken is only logged,
    because a night must not fail for want of a watcher.

    Args:
        address: such as 127.0.0.1:9464.
        run: the name of the run, or of the retraining.
    """
    if address is None or not _serving.acquire(blocking=False):
        yield None
        return
    try:
        server = _start(address, run)
        try:
            yield f"http://{address.rpartition(':')[0]}:{server.server_port}/metrics" if server else None
        finally:
            if server:
                ending = threading.Thread(target=server.shutdown, daemon=True)  # it waits for the present reader
                ending.start()
                ending.join(1)
                server.server_close()
    finally:
        _serving.release()


def _start(address: str, run: str) -> WSGIServer | None:
    registry = CollectorRegistry()
    registry.register(_OfRun(run))
    host, _, port = address.rpartition(":")
    try:
        server = make_server(host, int(port), make_wsgi_app(registry), handler_class=_Handler)
    except OSError as error:
        logger.warning(
            "no metrics: monitoring.prometheus=%s: %s. If another flow run serves there, give this one another port",
            address,
            error.strerror,
        )
        return None
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server
