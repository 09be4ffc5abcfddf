"""The numbers of this process, in Prometheus' types: whoever counts something imports it from here.

Values of labels are few and known in advance, as Prometheus needs it: kinds of data sets, states, operations, replicas.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, Summary

from storage.records import Fault, Status, VerdictName

REGISTRY = CollectorRegistry()
_counter = partial(Counter, namespace="math_mt_ppo", registry=REGISTRY)
_gauge = partial(Gauge, namespace="math_mt_ppo", registry=REGISTRY)
_histogram = partial(Histogram, namespace="math_mt_ppo", registry=REGISTRY)
KINDS = ("trajectories", "evaluation")
"""The kinds of data sets that are played."""

EPISODES = _counter("episodes", "Finished episodes; those of a lost worker count again when they are replayed",
                    ["kind", "status"])  # fmt: skip
FAULTS = _counter("faults", "Finished episodes without a verdict, by whose fault", ["kind", "fault"])
SOLVED = _counter("solved_episodes", "Finished episodes with a right turn", ["kind"])
GENERATED = _counter("generated_tokens", "Tokens that the policy sampled in finished episodes", ["kind"])
GROUPS = _gauge("groups", "Groups of the present rollout that wait, or that run on any worker", ["kind", "state"])
PLAYING = _gauge("episodes_in_flight", "Episodes that this process plays")
ASKED = _gauge("requests_in_flight", "Requests to a vLLM server that this process awaits", ["replica"])
REQUESTS = _histogram("request_seconds", "Time of requests to a vLLM server, retries included", ["replica"],
                      buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300))  # fmt: skip
REQUEST_RETRIES = _counter("request_retries", "Requests to a vLLM server that were sent again", ["replica"])
STALENESS = _gauge("staleness", "Policy versions between sampling and training, in the last update", ["statistic"])
POLICY_VERSION = _gauge("policy_version", "Number of updates of the newest checkpoint")
VERDICTS = _counter("verdicts", "Verdicts of scored turns", ["verdict"])
VERIFIER = _histogram("verifier_seconds", "Time until this process's verifier gave a verdict, its queue included",
                      ["verdict"], buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30))  # fmt: skip
STORE = _histogram("store_request_seconds", "Time of requests to S3, retries included", ["method"],
                   buckets=(0.001, 0.005, 0.025, 0.1, 0.5, 1, 5, 30, 120, 600))  # fmt: skip
STORE_RETRIES = _counter("store_retries", "Requests to S3 that were sent again")
LEASE_HELD = _gauge("lease_held", "1: this process may write the run; 0: another has taken it over", ["lease"])
LEASE_RENEWED = _gauge("lease_renewed_timestamp_seconds", "Time of the lease's last sign of life", ["lease"])
STAGES = Summary("stage_seconds", "Time of stages that were not skipped", ["stage"], "math_mt_ppo", registry=REGISTRY)

# A counter that appears with its first event hides that event from Prometheus' `rate` and `increase`.
for _kind in KINDS:
    for _status in get_args(Status):
        EPISODES.labels(_kind, _status)
    for _fault in filter(None, get_args(Fault)):
        FAULTS.labels(_kind, _fault)
for _verdict in get_args(VerdictName):
    VERDICTS.labels(_verdict)


def labelled(metrics: Iterable[Metric], name: str, value: str) -> Iterator[Metric]:
    """Yield metrics, each sample with one more label.

    Example: `vllm:num_requests_running{engine="0"} 3` becomes `vllm:num_requests_running{engine="0",replica="1"} 3`.
    """
    for metric in metrics:
        metric.samples = [sample._replace(labels={**sample.labels, name: value}) for sample in metric.samples]
        yield metric


@contextmanager
def queue(kind: str, waiting: Callable[[], int], running: Callable[[], int]) -> Iterator[None]:
    """Show how many groups of a rollout wait and run, until the block ends."""
    states = {"waiting": waiting, "running": running}
    for state, count in states.items():
        GROUPS.labels(kind, state).set_function(count)
    try:
        yield
    finally:
        for state in states:
            GROUPS.remove(kind, state)
