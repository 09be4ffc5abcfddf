"""Measure TRL's GRPOTrainer and this pipeline on the same model, problems, lengths and optimizer steps.

python -m tests.benchmarks.peers                  both workloads, about ten minutes on two cores
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
from tests.benchmarks.fixtures import Lab
from tests.benchmarks.peers.sides import WORKLOADS, Side, check_same_work, pipeline, ratios, trl
from tests.benchmarks.result import spread
from tests.support.overlay import overlay_python
from tests.support.paths import ROOT

FOLDER = ROOT / "var/peers"
PAIRS = 3
TITLES = ["workload", "TRL s", "here s", "TRL / here", "tokens of an episode", "samples", "updates"]


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
    os.environ["PREFECT_HOME"] = str(FOLDER / "prefect")  # before anything imports Prefect
    python = overlay_python(FOLDER / "trl", Path(__file__).with_name("requirements.txt"))
    with Lab(FOLDER / "policy") as lab:
        model = lab.policy.model
    lines = [_measure(name, model, python, arguments.pairs) for name in arguments.names or WORKLOADS]
    for line in (TITLES, ["---"] * len(TITLES), *lines):  # Markdown
        print(f"| {' | '.join(line)} |")


def _measure(name: str, model: Path, python: Path, count: int) -> list[str]:
    """Run the pairs of a workload; return its line of the table."""
    workload, pairs = WORKLOADS[name], list[tuple[Side, Side]]()
    for number in range(count):
        sides: dict[str, Side] = {}
        for side in ("TRL", "here") if number % 2 == 0 else ("here", "TRL"):
            with TemporaryDirectory(prefix="peers-") as scratch:
                if side == "TRL":
                    sides[side] = trl(workload, model, Path(scratch), python)
                else:
                    sides[side] = pipeline(name, model, Path(scratch))
            print(f"  {name}, pair {number + 1}, {side}: {spread(sides[side].seconds, '{:.2f}'.format)} s", flush=True)
        check_same_work(sides["TRL"], sides["here"])
        pairs.append((sides["TRL"], sides["here"]))
    theirs, ours = zip(*pairs, strict=True)

    def each(count: str) -> str:
        return " / ".join(f"{median(getattr(side, count) for side in sides):,.5g}" for sides in (theirs, ours))

    typical = [f"{median(side.typical for side in sides):.2f}" for sides in (theirs, ours)]
    ratio = spread(ratios(pairs), "{:.2f}".format)
    return [f"{name}: {workload.what}", *typical, ratio, each("tokens"), each("samples"), each("updates")]


if __name__ == "__main__":
    interrupts.run(main)
