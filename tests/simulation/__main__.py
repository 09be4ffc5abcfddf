"""Simulate an iteration that many workers play, in virtual time, and print what it took.

python -m tests.simulation                                         50 workers, 20,000 episodes: seconds
python -m tests.simulation --workers 1000 --episodes 1000000 --slots 256 --cpu
"""

import argparse
import ast
import inspect
import textwrap
from dataclasses import fields

from rich.console import Console
from rich.table import Table

from storage import interrupts
from tests.simulation.cluster import Scenario
from tests.simulation.scenario import Outcome, simulate


def main() -> int:
    """Simulate the scenario of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=(__doc__ or "").splitlines()[0])
    helps = _helps()
    for field in fields(Scenario):
        option = f"--{field.name.replace('_', '-')}"
        if isinstance(field.default, bool):
            parser.add_argument(option, action="store_true", help=helps[field.name])
        else:
            text = f"{helps[field.name]} (default: {field.default})"
            parser.add_argument(option, type=type(field.default), default=field.default, help=text, metavar="N")
    scenario = Scenario(**vars(parser.parse_args()))
    table = Table("workers", str(scenario.workers), title="virtual time, unless it is called real")
    for name, value in rows(simulate(scenario)):
        table.add_row(name, value)
    Console().print(table)
    return 0


def rows(outcome: Outcome) -> list[tuple[str, str]]:
    """Return what a simulation measured, in words."""
    cluster, loop, requests = outcome.cluster, outcome.loop, outcome.requests
    assert cluster.all_begun
    handed_out_s, utilisation = cluster.all_begun
    calls = cluster.calls.total()
    return [
        ("episodes", f"{outcome.manifest.rows:,} in {len(outcome.manifest.files):,} shards"),
        ("workers lost", f"{cluster.lost}, with {cluster.wasted:,} episodes playing"),
        ("slots busy until the last group was handed out", f"{utilisation:.2%} of {handed_out_s:.0f} s"),
        ("slots busy until the end", f"{cluster.slots.utilisation:.2%} of {outcome.played_s:.0f} s"),
        ("last episode to commit", f"{outcome.played_s - cluster.last_finished_s + outcome.commit_s:.1f} s"),
        ("calls of workers", f"{calls:,}, {calls / outcome.played_s:.0f}/s: {_listed(cluster.calls)}"),
        ("requests to the store", f"{requests.total():,}: {_listed(requests)}"),
        ("most requests to a prefix in a second", _listed(outcome.backend.busiest)),
        ("the flow's processor", f"{loop.busy_s:.0f} s, {loop.busy_s / outcome.played_s:.1%} of a core, "
                                 f"the ledger {loop.jobs_s:.0f} s of it"),
        ("journal and manifest", f"{outcome.journal_bytes:,} and {outcome.manifest_bytes:,} bytes"),
        ("lines in the log", str(len(outcome.lines))),
        ("peak memory, simulated workers included", f"{outcome.peak_bytes / 2**20:.0f} MiB"),
        ("real seconds", f"{outcome.real_s:.0f}"),
    ]  # fmt: skip


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items()))


def _helps() -> dict[str, str]:
    """Return the sentence below each field of a scenario."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(Scenario))).body
    assert isinstance(body, ast.ClassDef)
    pairs = zip(body.body, body.body[1:], strict=False)
    return {
        field.target.id: text.value.value
        for field, text in pairs
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr)
        if isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


if __name__ == "__main__":
    interrupts.run(main)
