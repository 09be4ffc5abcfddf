"""Measure TRL's GRPOTrainer and this pipeline on the same model, problems, lengths and optimizer steps.

python -m tests.benchmarks.peers                  all workloads, about half an hour on two cores
python -m tests.benchmarks.peers short --pairs 1  one workload, one process of each side

The sides run as processes, one after the other; they take turns to go first. The first rounds of each process are not
counted. TRL is installed into var/peers/trl (from PyPI, with pip); nothing else needs it.
"""

import argparse
import os
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from storage import interrupts
from storage.commands.program import Parser, whole
from tasks.metrics.rows import TIMES
from tests.benchmarks.peers.sides import WORKLOADS, Side, Workload, check_same_work, pipeline, ratios, trl
from tests.benchmarks.result import spread
from tests.support.overlay import overlay_python
from tests.support.paths import ROOT

FOLDER, REQUIREMENTS = ROOT / "var/peers/trl", Path(__file__).with_name("requirements.txt")
PAIRS = 3
TITLES = ["workload", "TRL s", "here s", "TRL / here", "rollout + score + train + rest", "tokens of an episode"]
TITLES += ["samples", "updates"]


def main() -> None:
    """Run the workloads that the command line names."""
    parser = Parser(
        prog="python -m tests.benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(WORKLOADS)} (default: all)")
    parser.add_argument("--pairs", type=whole(1), default=PAIRS, help=f"processes of each side (default {PAIRS})")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(WORKLOADS):
        parser.error(f"unknown workload {', '.join(sorted(unknown))}: choose from {', '.join(WORKLOADS)}")
    print(f"{os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.2f}", flush=True)
    python = overlay_python(FOLDER, REQUIREMENTS)
    lines = [compared(name, WORKLOADS[name], python, arguments.pairs) for name in arguments.names or WORKLOADS]
    for line in (TITLES, ["---"] * len(TITLES), *lines):  # Markdown
        print(f"| {' | '.join(line)} |")


def compared(name: str, workload: Workload, python: Path, count: int) -> list[str]:
    """Run `count` pairs of a workload; return its line of the table.

    Raises:
        ValueError: see `check_same_work`.
    """
    pairs = list[tuple[Side, Side]]()
    for number in range(count):
        sides: dict[str, Side] = {}
        for side in ("TRL", "here") if number % 2 == 0 else ("here", "TRL"):
            with TemporaryDirectory(prefix="peers-") as made, TemporaryDirectory(prefix="peers-") as scratch:
                model = workload.model(Path(made))
                if side == "TRL":
                    sides[side] = trl(workload, model, Path(scratch), python)
                else:
                    sides[side] = pipeline(workload, model, Path(scratch))
            print(f"  {name}, pair {number + 1}, {side}: {spread(sides[side].seconds, '{:.2f}'.format)} s", flush=True)
        check_same_work(sides["TRL"], sides["here"])
        pairs.append((sides["TRL"], sides["here"]))
    theirs, ours = zip(*pairs, strict=True)

    def each(count: str) -> str:
        return " / ".join(f"{median(getattr(side, count) for side in sides):,.5g}" for sides in (theirs, ours))

    typical = [f"{median(side.typical for side in sides):.2f}" for sides in (theirs, ours)]
    ratio = spread(ratios(pairs), "{:.2f}".format)
    parts = [median(side.stages[stage] for side in ours) for stage in TIMES]
    parts.append(median(side.typical - sum(side.stages.values()) for side in ours))
    spent = " + ".join(f"{seconds:.2f}" for seconds in parts)
    return [f"{name}: {workload.what}", *typical, ratio, spent, each("tokens"), each("samples"), each("updates")]


if __name__ == "__main__":
    interrupts.run(main)
