"""The audit of generated trajectories with every check but `logprob_drift`, which needs a model: time and memory.

Each size is audited in a process of its own, which is this file with the folder of a store as its argument. The setting
BENCH_AUDIT_ROWS=1000000 asks for another size, or several with commas between them.
"""

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from storage.objects.store import Store
from tests.benchmarks.fixtures import Lab
from tests.benchmarks.result import Row

SIZES = "10000,100000"
GOAL_S = 300 / 10  # for 100,000 trajectories more: a million in five minutes
GOAL_MB = 4096
SLOWEST = 5  # steps that are named


def measure(lab: Lab) -> list[Row]:
    """A store for each size, made here, and its audit."""
    from tests.support.audit_helpers import write_run

    found: dict[int, dict[str, Any]] = {}
    for size in map(int, os.environ.get("BENCH_AUDIT_ROWS", SIZES).split(",")):
        store = Store(f"{lab.scratch}/audited-{size}")
        write_run(store, "audited", size)
        found[size] = lab.run_module("audit", store.root)
    return [row for size, each in found.items() for row in _rows(size, each)] + _growth(found)


def _rows(size: int, found: dict[str, Any]) -> list[Row]:
    seconds = sum(found["seconds"].values())
    slowest = sorted(found["seconds"].items(), key=lambda item: -item[1])[:SLOWEST]
    steps = ", ".join(f"{name} {spent:.1f}" for name, spent in slowest)
    memory = found["own_mb"] + found["judges_mb"]
    return [
        Row(
            f"audit of {size:,} trajectories",
            f"{seconds:.1f} s",
            detail=f"{size / seconds:,.0f} rows/s with {found['checks']} checks, load average {found['load']:.1f}; "
            f"most of it: {steps}",
        ),
        Row(
            f"peak memory, {size:,} trajectories",
            f"{memory:,.0f} MB",
            f"{GOAL_MB:,} or less",
            memory <= GOAL_MB,
            f"{found['own_mb']:,.0f} MB, and {found['judges_mb']:,.0f} MB in the verifier's processes",
        ),
    ]


def _growth(found: dict[int, dict[str, Any]]) -> list[Row]:
    """From the smallest to the largest size; libraries are loaded in both."""
    low, high = min(found), max(found)
    if low == high:
        return []
    seconds = {size: sum(found[size]["seconds"].values()) for size in (low, high)}
    growth = (seconds[high] - seconds[low]) * 100_000 / (high - low)
    detail = f"from {low:,} to {high:,}: a million in {seconds[high] + growth * (1_000_000 - high) / 100_000:.0f} s"
    return [
        Row("audit of 100,000 trajectories more", f"{growth:.1f} s", f"{GOAL_S:.0f} or less", growth <= GOAL_S, detail)
    ]


def main(root: str) -> None:
    """Audit all runs of the store; the last line of output says what it took."""
    from configs.audit import Audit
    from storage.versions.drafts import Provenance
    from tasks.audit.record import commit_audit
    from tasks.audit.run import audit
    from tasks.audit.selection import select
    from tasks.score.verifier import Verifier

    store, begun = Store(root), time.monotonic()
    chosen = select(store, [])
    selecting = time.monotonic() - begun
    with Verifier() as verifier, audit(store, chosen, Audit(recomputed=0), Path("cache"), verifier) as audited:
        result = audited.result
        unhappy = [f"{check.name}: {check.says}" for check in result.checks if check.verdict in ("warn", "fail")]
        assert not unhappy, unhappy
        begun = time.monotonic()
        commit_audit(store, chosen, audited, Provenance(config={}), Path("cache"), "read")
        committing = time.monotonic() - begun
        found = {
            "seconds": {"select": selecting, **result.seconds, "report and commit": committing},
            "checks": sum(check.verdict == "pass" for check in result.checks),
            "own_mb": _peak_mb(os.getpid()),
            "judges_mb": sum(map(_peak_mb, _children())),
            "load": os.getloadavg()[0],
        }
    print(json.dumps(found))


def _children() -> list[int]:
    from psutil import Process

    return [child.pid for child in Process().children(recursive=True)]


def _peak_mb(process: int) -> float:
    """Not getrusage: its ru_maxrss is handed on through fork and exec, so a child starts with its parent's peak."""
    return int(re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())[0]) / 1024


if __name__ == "__main__":
    main(sys.argv[1])
