"""Time and memory of an audit of generated trajectories, without `logprob_drift`, which needs a model.

Each size is audited in a new process, which runs this file with the folder of a store as its argument. The environment
variable BENCH_AUDIT_ROWS=1000000 sets another size, or several sizes separated by commas.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from storage.objects.store import Store
from tests.benchmarks.fixtures import Lab
from tests.benchmarks.result import Row, peak_memory_mb

SIZES = "10000,100000"
GOAL_S = 300 / 10  # for each 100,000 additional trajectories: a million in five minutes
GOAL_MB = 4096
SLOWEST = 5  # number of steps that the table names


def measure(lab: Lab) -> list[Row]:
    """Make a store of each size and audit it in a new process."""
    from tests.support.audit_scene import write_run

    measured: dict[int, dict[str, Any]] = {}
    for size in map(int, os.environ.get("BENCH_AUDIT_ROWS", SIZES).split(",")):
        store = Store(f"{lab.scratch}/audited-{size}")
        write_run(store, "audited", size)
        measured[size] = lab.run_module("audit", store.root)
    return [row for size, result in measured.items() for row in _rows(size, result)] + _growth(measured)


def _rows(size: int, measured: dict[str, Any]) -> list[Row]:
    seconds = sum(measured["seconds"].values())
    slowest = sorted(measured["seconds"].items(), key=lambda item: -item[1])[:SLOWEST]
    steps = ", ".join(f"{name} {spent:.1f}" for name, spent in slowest)
    memory = measured["own_mb"] + measured["workers_mb"]
    return [
        Row(
            f"audit of {size:,} trajectories",
            f"{seconds:.1f} s",
            detail=f"{size / seconds:,.0f} rows/s with {measured['checks']} checks, "
            f"load average {measured['load']:.1f}; slowest steps: {steps}",
        ),
        Row(
            f"peak memory, {size:,} trajectories",
            f"{memory:,.0f} MB",
            f"{GOAL_MB:,} or less",
            memory <= GOAL_MB,
            f"{measured['own_mb']:,.0f} MB, and {measured['workers_mb']:,.0f} MB in the verifier's processes",
        ),
    ]


def _growth(measured: dict[int, dict[str, Any]]) -> list[Row]:
    """Compute the growth from the smallest to the largest size; the cost of loading libraries cancels out."""
    low, high = min(measured), max(measured)
    if low == high:
        return []
    seconds = {size: sum(measured[size]["seconds"].values()) for size in (low, high)}
    growth = (seconds[high] - seconds[low]) * 100_000 / (high - low)
    detail = f"from {low:,} to {high:,}: a million in {seconds[high] + growth * (1_000_000 - high) / 100_000:.0f} s"
    return [
        Row("audit of 100,000 trajectories more", f"{growth:.1f} s", f"{GOAL_S:.0f} or less", growth <= GOAL_S, detail)
    ]


def main(root: str) -> None:
    """Audit all runs of the store; print time and memory as JSON in the last line of output."""
    from configs.audit import Audit
    from storage.versions.drafts import Provenance
    from tasks.audit.data_sets import select
    from tasks.audit.record import commit_audit
    from tasks.audit.run import audit
    from tasks.score.verifier import Verifier

    store, started = Store(root), time.monotonic()
    chosen = select(store, [])
    selecting = time.monotonic() - started
    with Verifier() as verifier, audit(store, chosen, Audit(recomputed=0), Path("cache"), verifier) as audited:
        result = audited.result
        failed = [f"{check.name}: {check.says}" for check in result.checks if check.verdict in ("warn", "fail")]
        assert not failed, failed
        started = time.monotonic()
        commit_audit(store, chosen, audited, Provenance(config={}), Path("cache"), "read")
        committing = time.monotonic() - started
        measured = {
            "seconds": {"select": selecting, **result.seconds, "report and commit": committing},
            "checks": sum(check.verdict == "pass" for check in result.checks),
            "own_mb": peak_memory_mb(os.getpid()),
            "workers_mb": sum(map(peak_memory_mb, _children())),
            "load": os.getloadavg()[0],
        }
    print(json.dumps(measured))


def _children() -> list[int]:
    from psutil import Process

    return [child.pid for child in Process().children(recursive=True)]


if __name__ == "__main__":
    main(sys.argv[1])
