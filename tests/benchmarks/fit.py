"""Plan and read the updates of `flows.fit` on generated trajectories: seconds, memory, and trajectories/s.

A new process plans and reads. BENCH_FIT_ROWS=1000000 sets another size than 100,000. An update of the demo trains on
about 600 trajectories/s on two cores.
"""

import json
import os
import sys
import time
from pathlib import Path

from storage.objects.store import Store
from tests.benchmarks.fixtures import Lab
from tests.benchmarks.result import Row, peak_memory_mb

READ = 20
"""Number of updates that are read."""


def measure(lab: Lab) -> list[Row]:
    """Make a store, and plan and read in a new process."""
    from tests.support.audit_scene import write_run

    size = int(os.environ.get("BENCH_FIT_ROWS", "100000"))
    store = Store(f"{lab.scratch}/fitted-{size}")
    write_run(store, "fitted", size)
    found = lab.run_module("fit", store.root)
    held = sum(item.bytes for item in store.walk("runs")) / 1e6
    detail = (
        f"{held:,.0f} MB stored, {found['updates']:,} updates planned in {found['planned']:.1f} s; memory "
        f"{found['mb']:,.0f} MB, of which {found['before']:,.0f} before, libraries included"
    )
    return [Row(f"reading for fit, {size:,} trajectories", f"{found['rate']:,.0f} trajectories/s", detail)]


def main(root: str) -> None:
    """Plan all updates and read some of them; print numbers as JSON in the last line of output."""
    import torch  # noqa: F401  so that the memory before counts it

    from configs import load
    from storage import layout
    from tasks.fit.plan import plan_updates, select_data
    from tasks.train.orders import UpdateOrder
    from tasks.train.version_trainer import VersionTrainer

    config = load("demo", [f"storage.root={root}", "algorithm.type=rft", "fit.data=[fitted]"])
    store, before = Store(root), peak_memory_mb()
    started = time.monotonic()
    updates = plan_updates(store, config, select_data(store, config), Path("cache"))
    planned, trainer, rows = time.monotonic() - started, VersionTrainer(config), 0
    started = time.monotonic()
    for parts in updates[:READ]:
        order = UpdateOrder(layout.checkpoint("fit", 1), layout.checkpoint("fit", 0), parts)
        rows += len(trainer._data(order, [], print)[0])
    rate = rows / (time.monotonic() - started)
    numbers = {"updates": len(updates), "planned": planned, "rate": rate, "mb": peak_memory_mb(), "before": before}
    print(json.dumps(numbers))


if __name__ == "__main__":
    main(sys.argv[1])
