"""`exclude`: commit a version of problems or trajectories that are kept out of training."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from storage.commands.program import Output
from storage.objects.store import Store
from tasks.problems.exclusions import commit_exclusions, exclusions_version
from tasks.provenance.commands.shared import add_problem, show_problem, show_uncertain
from tasks.provenance.proposals import Proposal, propose_ids, propose_problem

if TYPE_CHECKING:
    from rich.table import Table

_MOST_BYTES = 2**26
"""The largest file of ids: room for a million ids."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_problem(parser, optional=True)
    parser.add_argument(
        "--ids", metavar="FILE", type=Path, help="instead of PROBLEM: a file of trajectory ids, one in each line"
    )
    parser.add_argument("--reason", required=True, metavar="TEXT", help="why they are excluded, for later readers")
    parser.add_argument("--dry-run", action="store_true", help="only print what would be excluded")


def run(store: Store, arguments: argparse.Namespace) -> Output:
    """Commit the exclusions; print the version and the override with which a run honours it."""
    proposal = _propose(store, arguments)
    commit = not arguments.dry_run
    version = commit_exclusions(store, proposal.rows) if commit else exclusions_version(proposal.rows)
    override = f"problems.exclusions=[{version}]"
    data = {
        "version": version,
        "override": override,
        "committed": commit,
        "rows": [asdict(row) for row in proposal.rows],
        "trained": proposal.trained,
        "unknown": [asdict(each) for each in proposal.unknown],
    }
    parts: list[Table | str] = [show_problem(proposal.problem)] if proposal.problem else []
    parts += [_summary(proposal), *show_uncertain([], proposal.unknown)]
    parts += [
        f"{version}\nuse it, in addition to others that a run already honours, with\n    {override!r}"
        if commit
        else f"nothing was committed; it would be {version}"
    ]
    return Output(data, parts)


def _propose(store: Store, arguments: argparse.Namespace) -> Proposal:
    cache, reason = Path(arguments.cache), arguments.reason
    if (arguments.problem is None) == (arguments.ids is None):
        raise ValueError("give either PROBLEM or --ids FILE")
    if arguments.ids is None:
        name = arguments.problem
        return propose_problem(store, name, cache, reason, run=arguments.run, by_prompt=arguments.prompt)
    ids = [line.strip() for line in _read(arguments.ids).splitlines()]
    return propose_ids(store, [name for name in ids if name], cache, reason, run=arguments.run)


def _read(path: Path) -> str:
    with path.open("rb") as file:  # may also be a pipe
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{path} has more than {_MOST_BYTES:,} bytes: give one trajectory id in each line")
    try:
        return data.decode("utf-8-sig")  # -sig: some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        where = f"{path} is not UTF-8 text (byte {error.start})"
        raise ValueError(f"{where}: give one trajectory id in each line") from None


def _summary(proposal: Proposal) -> str:
    trajectories = [row for row in proposal.rows if row.trajectory_id]
    sets = len({row.data_set for row in trajectories})
    whole = "; the problem is no longer drawn, and no other trajectory of it is trained on" if proposal.problem else ""
    trained = f"; {len(proposal.trained)} checkpoints were trained on some of them and stay unchanged: see `impact`"
    return f"{len(trajectories)} trajectories in {sets} data sets{whole}{trained if proposal.trained else ''}"
