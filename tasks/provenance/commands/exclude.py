"""`exclude`: a version of what shall not be trained on."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from storage.commands.output import Output
from storage.objects.store import Store
from tasks.provenance.commands.shared import add_problem, show_problem, show_uncertain

if TYPE_CHECKING:
    from rich.table import Table

    from tasks.provenance.proposals import Proposal

_LARGEST = 2**26
"""Bytes of a file of ids: room for a million."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_problem(parser, optional=True)
    parser.add_argument(
        "--ids", metavar="FILE", type=Path, help="instead of a problem: ids of trajectories, one in each line"
    )
    parser.add_argument("--reason", required=True, metavar="TEXT", help="why, for those who ask later")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be excluded")


def run(store: Store, arguments: argparse.Namespace) -> Output:
    """The version, and the override by which a run honours it."""
    from tasks.problems.exclusions import commit_exclusions, version_of

    proposal = _propose(store, arguments)
    commit = not arguments.dry_run
    version = commit_exclusions(store, proposal.rows) if commit else version_of(proposal.rows)
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
    parts += [_told(proposal), *show_uncertain([], proposal.unknown)]
    parts += [
        f"{version}\nuse it, beside others that a run honours already, with\n    {override!r}"
        if commit
        else f"nothing was committed; it would be {version}"
    ]
    return Output(data, parts)


def _propose(store: Store, arguments: argparse.Namespace) -> "Proposal":
    from tasks.provenance.proposals import propose_ids, propose_problem

    cache, reason = Path(arguments.cache), arguments.reason
    if (arguments.problem is None) == (arguments.ids is None):
        raise ValueError("give either PROBLEM or --ids FILE")
    if arguments.ids is None:
        name = arguments.problem
        return propose_problem(store, name, cache, reason, run=arguments.run, by_prompt=arguments.prompt)
    ids = [line.strip() for line in _read(arguments.ids).splitlines()]
    return propose_ids(store, [name for name in ids if name], cache, reason, run=arguments.run)


def _read(path: Path) -> str:
    with path.open("rb") as file:  # a pipe, too: somebody waits at the terminal
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ValueError(f"{path} holds more than {_LARGEST:,} bytes: give one id of a trajectory in each line")
    try:
        return data.decode("utf-8-sig")  # -sig: some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        where = f"{path} is not text in UTF-8 (byte {error.start})"
        raise ValueError(f"{where}: give one id of a trajectory in each line") from None


def _told(proposal: "Proposal") -> str:
    trajectories = [row for row in proposal.rows if row.trajectory_id]
    sets = len({row.data_set for row in trajectories})
    whole = "; the problem will not be drawn, nor anything else of it be trained on" if proposal.problem else ""
    after = f"; {len(proposal.trained)} checkpoints were trained on some of them, and stay as they are: see `falls`"
    return f"{len(trajectories)} trajectories in {sets} data sets{whole}{after if proposal.trained else ''}"
