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
from tests.benchmarks.fixtures import Lab
from tests.benchmarks.peers import processes
from tests.benchmarks.peers.sides import Side, check_same_work, ratios
from tests.benchmarks.peers.workloads import STEPS, WORKLOADS, Workload
from tests.benchmarks.result import spread
from tests.support.overlay import overlay_python
from tests.support.paths import ROOT

FOLDER = ROOT / "var/peers"
PAIRS = 3
TITLES = ["workload", "TRL s", "here s", "TRL / here", "tokens of an episode", "samples", "updates", "other processes"]


def main() -> None:
    """Run the workloads that the command line names."""
    arguments = _arguments()
    print(f"{os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.2f}", flush=True)
    os.environ["PREFECT_HOME"] = str(FOLDER / "prefect")  # before anything imports Prefect
    python = overlay_python(FOLDER / "trl", Path(__file__).with_name("requirements.txt"))
    lines: list[list[str]] = []
    try:
        for name in arguments.names or WORKLOADS:
            lines.append(_measure(WORKLOADS[name], python, arguments))
    finally:  # if one fails, show the results of those before it
        _show(lines)


def _arguments() -> argparse.Namespace:
    listing = "\n".join(f"  {name:11}{workload.what}" for name, workload in WORKLOADS.items())
    parser = Parser(
        prog="python -m tests.benchmarks.peers",
        description=__doc__,
        epilog=f"workloads:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="workloads to run (default: all)")
    parser.add_argument("--rounds", type=whole(1), help="counted rounds of each process (default: the workload's own)")
    parser.add_argument("--pairs", type=whole(1), default=PAIRS, help=f"processes of each side (default {PAIRS})")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an override for the pipeline's side"
    )
    parser.add_argument(
        "--micro-batch",
        type=whole(1),
        default=processes.MICRO_BATCH,
        help=f"TRL's per_device_train_batch_size (default {processes.MICRO_BATCH})",
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(WORKLOADS):
        parser.error(f"unknown workload {', '.join(sorted(unknown))}: choose from {', '.join(WORKLOADS)}")
    return arguments


def _measure(workload: Workload, python: Path, arguments: argparse.Namespace) -> list[str]:
    """Run the pairs of a workload; return its line of the table."""
    print(f"{workload.name}: {workload.what}, {STEPS[workload.policy]}", flush=True)
    with Lab(FOLDER / f"policy-{workload.policy}", workload.policy) as lab:
        model = lab.policy.model
    rounds, pairs = arguments.rounds or workload.rounds, list[tuple[Side, Side]]()
    for number in range(arguments.pairs):
        sides: dict[str, Side] = {}
        for side in ("TRL", "here") if number % 2 == 0 else ("here", "TRL"):
            with TemporaryDirectory(prefix="peers-") as scratch:
                if side == "TRL":
                    sides[side] = processes.trl(workload, rounds, model, Path(scratch), python, arguments.micro_batch)
                else:
                    sides[side] = processes.pipeline(workload, rounds, model, Path(scratch), arguments.set)
            print(f"  pair {number + 1}, {side}: {_describe(sides[side])}", flush=True)
        check_same_work(sides["TRL"], sides["here"])
        pairs.append((sides["TRL"], sides["here"]))
    return _line(workload, pairs)


def _describe(side: Side) -> str:
    parts = ", ".join(f"{part} {median(seconds):.2f}" for part, seconds in side.parts.items())
    return (
        f"{spread(side.seconds, '{:.2f}'.format)} s a round ({parts}); {len(side.seconds)} rounds, "
        f"{side.samples} samples of {side.tokens:.2f} tokens, {side.updates} updates; other processes {side.others:.0%}"
    )


def _line(workload: Workload, pairs: list[tuple[Side, Side]]) -> list[str]:
    theirs, ours = zip(*pairs, strict=True)

    def each(count: str) -> str:
        return " / ".join(f"{median(getattr(side, count) for side in sides):,.5g}" for sides in (theirs, ours))

    return [
        f"{workload.name}: {workload.what}",
        f"{median(side.typical for side in theirs):.2f}",
        f"{median(side.typical for side in ours):.2f}",
        spread(ratios(pairs), "{:.2f}".format),
        each("tokens"),
        each("samples"),
        each("updates"),
        " / ".join(f"{max(side.others for side in sides):.0%}" for sides in (theirs, ours)),
    ]


def _show(lines: list[list[str]]) -> None:
    """Print the table, as Markdown."""
    for line in (TITLES, ["---"] * len(TITLES), *lines):
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    interrupts.run(main)
