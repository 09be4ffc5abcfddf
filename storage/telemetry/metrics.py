"""The numbers of this process, in Prometheus' types: whoever counts something imports it from here.

Values of labels are few and known in advance, as Prometheus needs it: kinds of data sets, states, operations, replicas.

`serve` has the endpoint `/metrics`, for Prometheus on the same machine: on the loopback interface, without password.
Every user of the machine can read it. It answers one connection at a time, so that nobody takes more than one file of
this process, and waits a second for a silent one: who connects again and again delays other readers, and nothing else.
"""

import logging
import threading
from collections.abc import Iterable, Iterator
from functools import cache, partial
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, make_wsgi_app

from storage.telemetry.spans import export_spans


def labelled(metrics: Iterable[Metric], name: str, value: str) -> Iterator[Metric]:
    """Yield metrics, each sample with one more label.

    Example: `vllm:num_requests_running{engine="0"} 3` becomes `vllm:num_requests_running{engine="0",replica="1"} 3`.
    """
    for metric in metrics:
        metric.samples = [sample._replace(labels={**sample.labels, name: value}) for sample in metric.samples]
        yield metric


class _Registry(CollectorRegistry):
    """Gives each sample the label `run`, and joins what servers and workers have by the same name, once for a page."""

    run = ""

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for metric in labelled(super().collect(), "run", self.run):
            family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            family.samples += metric.samples
        yield from families.values()


REGISTRY = _Registry()
_counter = partial(Counter, namespace="math_mt_ppo", registry=REGISTRY)
_gauge = partial(Gauge, namespace="math_mt_ppo", registry=REGISTRY)
_histogram = partial(Histogram, namespace="math_mt_ppo", registry=REGISTRY)

EPISODES = _counter("episodes", "Finished episodes; those of a lost worker count again when replayed",
                    ["kind", "status"])  # fmt: skip
FAULTS = _counter("faults", "Finished episodes without a verdict, by whose fault", ["kind", "fault"])
GENERATED = _counter("generated_tokens", "Tokens that the policy sampled in finished episodes", ["kind"])
WAITING = _gauge("groups_waiting", "Groups that may begin, and that no worker plays yet", ["kind"])
PLAYING = _gauge("episodes_in_flight", "Episodes that this process plays")
ITERATION = _gauge("iteration", "The iteration that the run is in")
STALENESS = _gauge("staleness", "Policy versions between sampling and training, in the last update", ["statistic"])
VERDICTS = _counter("verdicts", "Verdicts of scored turns", ["verdict"])
VERIFIER = _histogram("verifier_seconds", "Time until a verifier gave a verdict, its queue included", ["verdict"])
STORE = _histogram("store_request_seconds", "Time of requests to S3, retries included", ["method"])
STORE_RETRIES = _counter("store_retries", "Requests to S3 that were sent again")
LEASE_RENEWED = _gauge("lease_renewed_timestamp_seconds", "Time of the lease's last sign of life", ["lease"])

# A counter that appears with its first event hides that event from Prometheus' `increase`, which the alerts use.
for _kind in ("trajectories", "evaluation"):
    EPISODES.labels(_kind, "completed")
    FAULTS.labels(_kind, "set-up")


logger = logging.getLogger(__name__)


class _Handler(WSGIRequestHandler):
    timeout = 1.0  # seconds to wait for each part of a request, and to send each part of the answer

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # the name of the overridden method's
        """Log nothing: a scrape every few seconds is no news."""


def publish(port: int | None, run: str) -> None:
    """Label the numbers of this process with a run, and serve them at a port until it ends; export its spans, too."""
    REGISTRY.run = run
    export_spans()
    if port is not None:
        serve(port)


@cache
def serve(port: int) -> str | None:
    """Serve the numbers of this process until it ends; return the URL. Port 0: a free one.

    A port that is taken is only logged, because a night must not fail for want of a watcher.
    """
    try:
        server = make_server("127.0.0.1", port, make_wsgi_app(REGISTRY), handler_class=_Handler)
    except OSError as error:
        text = "no metrics: monitoring.prometheus=%d: %s. If another flow run serves there, choose another port"
        logger.warning(text, port, error.strerror)
        return None
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/metrics"
