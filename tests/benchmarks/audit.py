"""Time and memory of an audit of generated trajectories, without `logprob_drift`, which needs a model.

Each size is audited in a new process, which runs this file with the folder of a store as its argument. The environment
variable BENCH_AUDIT_ROWS=1000000 sets another size, or several sizes separated by commas.
"""

import json
import os
import sys
import time
from pathlib import Path

from psutil import Process

from storage.objects.store import Store
from tests.benchmarks.fixtures import Lab
from tests.benchmarks.result import Row, peak_memory_mb

SIZES = "10000,100000"


def measure(lab: Lab) -> list[Row]:
    """Make a store of each size and audit it in a new process."""
    from tests.support.audit_scene import write_run

    rows = []
    for size in map(int, os.environ.get("BENCH_AUDIT_ROWS", SIZES).split(",")):
        store = Store(f"{lab.scratch}/audited-{size}")
        write_run(store, "audited", size)
        found = lab.run_module("audit", store.root)
        steps = sorted(found["steps"].items(), key=lambda step: -step[1])[:5]
        slowest = ", ".join(f"{name} {seconds:.1f}" for name, seconds in steps)
        detail = f"peak memory {found['mb']:,.0f} MB, verifier included; slowest steps: {slowest}"
        rows.append(Row(f"audit of {size:,} trajectories", f"{found['seconds']:.1f} s", detail))
    return rows


def main(root: str) -> None:
    """Audit all runs of the store; print time and memory as JSON in the last line of output."""
    from configs.audit import Audit
    from storage.versions.drafts import Provenance
    from tasks.audit.run import audit, commit_audit
    from tasks.score.verifier import Verifier
    from tasks.tables.sets import select

    store, started = Store(root), time.monotonic()
    chosen = select(store, [])
    with Verifier() as verifier, audit(store, chosen, Audit(recomputed=0), Path("cache"), verifier) as audited:
        failed = [f"{check.name}: {check.says}" for check in audited.result.checks if check.verdict in ("warn", "fail")]
        assert not failed, failed
        commit_audit(store, chosen, audited, Provenance(config={}), Path("cache"), "read")
        seconds = time.monotonic() - started
        family = [os.getpid(), *(child.pid for child in Process().children(recursive=True))]
        memory = sum(map(peak_memory_mb, family))
    print(json.dumps({"seconds": seconds, "steps": audited.result.seconds, "mb": memory}))


if __name__ == "__main__":
    main(sys.argv[1])
