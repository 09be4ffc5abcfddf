"""Measure the pipeline's speed and memory on this machine, as ratios from one run.

python -m tests.benchmarks              all benchmarks; overlap alone takes about 50 minutes on two cores
python -m tests.benchmarks training     one benchmark
"""

import argparse
import importlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from flows.launch.cli import share_cores
from storage import interrupts
from tests.benchmarks.fixtures import Lab
from tests.benchmarks.result import Row

BENCHMARKS = {
    "start": "seconds from the command to the first episode of a new and of a continued demo, and its parts",
    "rollout": "the rollout stage against the same bare requests to the same vLLM server",
    "tools": "calls/s of the python tool: each in a sandbox of its own, and of an interpreter that stays",
    "guard": "the two ratios that must not fall: rollout stage against bare requests, stages against the iteration",
    "iteration": "where the seconds of an iteration go: the demo, SmolLM2, a 1.5B shape on a GPU",
    "training": "the training pass against a bare forward-backward loop",
    "smollm2": "an update of SmolLM2-135M with an adapter: seconds",
    "algorithms": "every algorithm's update against that of PPO with the same passes",
    "fit": "planning and reading of updates from stored trajectories: trajectories/s and memory",
    "ranks": "a trainer of several ranks: overhead, speed, memory, with 30 million parameters",
    "cluster": "simulated nodes: episodes/s of 1 to 16 workers",
    "collectors": "episodes/s and processor time of 1, 2 and 4 processes that play, with servers that only wait",
    "overlap": "the stream (run.overlap) against iterations one after the other, and against the longer stage",
    "audit": "the audit of 10,000 and 100,000 generated trajectories: seconds and peak memory",
}
WIDTH = 140  # columns of the table if the output is no terminal


def main() -> None:
    """Run the benchmarks that the command line names."""
    listing = "\n".join(f"  {name:11}{what}" for name, what in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description=(__doc__ or "").splitlines()[0],
        epilog=f"benchmarks:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run (default: all)")
    names = parser.parse_args().names or list(BENCHMARKS)
    if unknown := set(names) - set(BENCHMARKS):
        parser.error(f"unknown benchmark {', '.join(sorted(unknown))}: choose from {', '.join(BENCHMARKS)}")
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # before anything imports Ray
    share_cores()
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} CPUs, load average {load:.2f}" + (": not idle, so numbers are worse" * (load > 0.5)))
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as scratch, Lab(Path(scratch)) as lab:
        os.environ["PREFECT_HOME"] = f"{scratch}/prefect"  # before anything imports Prefect
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # math-verify warns of each answer that it cannot read
        rows: list[Row] = []
        try:
            for name in names:
                rows.extend(_run(name, lab))
        finally:  # if one fails, show the results of those before it
            show(rows)


def _run(name: str, lab: Lab) -> Iterator[Row]:
    print(f"{name}: {BENCHMARKS[name]}", flush=True)
    start = time.monotonic()
    for row in importlib.import_module(f"tests.benchmarks.{name}").measure(lab):
        print(f"  {row.benchmark}: {row.measured}; {row.detail}", flush=True)
        yield row
    print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)


def show(rows: list[Row]) -> None:
    """Print the table of results."""
    from rich.console import Console
    from rich.table import Table

    table = Table("benchmark", "measured", "detail", show_lines=True)
    for row in rows:
        table.add_row(row.benchmark, row.measured, row.detail)
    Console(width=max(Console().width, WIDTH)).print(table)


if __name__ == "__main__":
    interrupts.run(main)
