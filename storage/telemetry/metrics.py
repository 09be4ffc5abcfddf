"""The numbers of this process, in Prometheus' types: whoever counts something imports it from here.

Values of labels are few and known in advance, as Prometheus needs it: kinds of data sets, states, operations, replicas.
"""

from collections.abc import Iterable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric


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
