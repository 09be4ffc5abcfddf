import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from storage.logs.leases import Lease
from storage.objects.store import Store
from storage.telemetry.metrics import publish, serve
from tests.support.otlp_receiver import Receiver, receiver
from tests.support.paths import ROOT


def scrape(url: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the samples of an endpoint by name and labels."""
    with urlopen(url, timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(url: str, name: str, **labels: str) -> float | None:
    return scrape(url).get((f"math_mt_ppo_{name}", frozenset({"run": "demo", **labels}.items())))


def page() -> str:
    """Return the URL of this process's numbers, which are those of the run `demo`."""
    publish(None, "demo")
    return str(serve(0))


def test_a_lease_is_seen_while_it_lasts(store: Store) -> None:
    """Every number has the run as a label; signs of life renew a lease, and a released one cannot raise an alarm."""
    url = page()
    with Lease(store, "demo", ttl_s=0.4):
        taken = value(url, "lease_renewed_timestamp_seconds", lease="demo")
        assert taken == pytest.approx(time.time(), abs=60)
        while value(url, "lease_renewed_timestamp_seconds", lease="demo") == taken:
            time.sleep(0.05)
    assert value(url, "lease_renewed_timestamp_seconds", lease="demo") is None
    assert value(url, "faults_total", kind="trajectories", fault="set-up") is not None  # before the first of them


def test_a_taken_port_and_silent_readers_stop_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Who connects and says nothing takes one file of the process and a second at most."""
    port = int(page().split(":")[2].split("/")[0])
    before = len(list(Path("/proc/self/fd").iterdir()))
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
    time.sleep(0.2)
    assert len(list(Path("/proc/self/fd").iterdir())) - before - len(silent) <= 1
    assert scrape(f"http://127.0.0.1:{port}/metrics")  # after those that came before
    for connection in silent:
        connection.close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve(port) is None
    assert f"no metrics: monitoring.prometheus={port}: Address already in use" in caplog.text


def test_requests_to_s3_are_counted_by_method(bucket: str) -> None:
    store = Store(f"s3://{bucket}/root")
    url = page()
    before = value(url, "store_request_seconds_count", method="put_object") or 0
    store.write("a", b"1")
    assert not store.create("a", b"2")
    assert value(url, "store_request_seconds_count", method="put_object") == before + 2


TRACED = """
from storage import layout
from storage.telemetry import spans
spans.export_spans()
spans.export_spans()  # a night opens two runs
def iterations():
    for number in range(2):
        with spans.span("iteration", run="demo", iteration=number):
            yield number
def loop():
    for number in iterations():
        with spans.making(layout.trajectories("demo", number)):
            with spans.span("generate"):
                pass
            if number:
                raise ValueError("what a policy wrote")
try:
    loop()
except ValueError:
    pass
"""


def traced(**environment: str) -> float:
    """Run `TRACED` in a process of its own; return its seconds."""
    started, given = time.monotonic(), {key: v for key, v in os.environ.items() if not key.startswith("OTEL_")}
    subprocess.run([sys.executable, "-c", TRACED], env=given | environment, cwd=ROOT, check=True)
    return time.monotonic() - started


@pytest.fixture(scope="module")
def received() -> Receiver:
    with receiver() as got:
        traced(OTEL_EXPORTER_OTLP_ENDPOINT=got.url)
    return got


def test_spans_of_an_iteration_are_one_trace(received: Receiver) -> None:
    paths = sorted("/".join(received.path(span)) for span in received.spans)
    assert paths == sorted(2 * ["iteration", "iteration/rollout", "iteration/rollout/generate"])
    assert len({span.trace for span in received.spans}) == 2
    first = next(span for span in received.named("rollout") if not span.error)
    assert first.attributes == {"run": "demo", "version": "runs/demo/trajectories/000000"}
    assert received.services == {"math-mt-ppo"}


def test_a_failed_stage_says_the_kind_of_error_only(received: Receiver) -> None:
    """An iteration whose loop failed is exported, too, and no error's text leaves the process."""
    assert [span.error for span in received.named("rollout")] == ["", "ValueError"]
    assert [span.error for span in received.named("iteration")] == ["", "GeneratorExit"]
    assert b"what a policy wrote" not in received.received


@pytest.mark.long
def test_without_a_receiver_nothing_is_exported_and_a_dead_one_delays_the_end_by_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections, and never answers
        port = silent.getsockname()[1]
        assert traced(OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{port}") < traced() + 10
