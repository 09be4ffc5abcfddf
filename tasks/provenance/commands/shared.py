"""The arguments that name a problem, and the tables and lines that several commands print."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from storage.commands.program import table, whole
from storage.visible import visible
from tasks.provenance.answers import FirstTrained, Unknown
from tasks.provenance.problem_lookup import FoundProblem

if TYPE_CHECKING:
    from rich.table import Table

_MOST_CHARACTERS = 200
_MOST_NAMES = 3


def add_problem(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add PROBLEM, --prompt and --run."""
    parser.add_argument("problem", metavar="PROBLEM", nargs="?" if optional else None)
    parser.add_argument("--prompt", action="store_true", help="PROBLEM is a part of its prompt")
    parser.add_argument("--run", help="consider only trajectories of this run")


def add_last(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("-n", "--last", type=whole(0), default=20, metavar="N", help=f"{what} shown; default 20")


def show_problem(problem: FoundProblem) -> str:
    """Return prompt, gold answers, ids and key on two lines."""
    prompt, gold = " ".join(problem.prompt.split()), "; ".join(problem.solutions)
    ids = ", ".join(problem.problem_ids[:_MOST_NAMES]) + (" …" if len(problem.problem_ids) > _MOST_NAMES else "")
    texts = f"{visible(prompt, _MOST_CHARACTERS)} -> {visible(gold, _MOST_CHARACTERS)}"
    return f"{texts}\nid {visible(ids)}, key {problem.key}"


def first_rows(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], most: int, title: str = ""
) -> "list[Table | str]":
    """Return the first `most` rows as a table, and a line with the number of the others."""
    left = len(rows) - most
    more = [f"  … and {left:,} more: -n {len(rows)}, or --json"] if left > 0 else []
    return [table(columns, rows[:most], title), *more] if rows else []


def show_first(first: Sequence[FirstTrained]) -> "list[Table | str]":
    rows = [(each.run, each.checkpoint, each.checkpoints, each.clean or "none") for each in first]
    columns = ["run", "first checkpoint", "checkpoints of the run", "last one before it"]
    return first_rows(columns, rows, len(rows), "Trained on it, or descended from one that was")


def show_uncertain(doubtful: Sequence[str], unknown: Sequence[Unknown]) -> list[str]:
    """Return lines about versions that cannot be read, and about checkpoints that may be affected because of them."""
    lines = []
    if unknown:
        shown = "; ".join(f"{each.version}: {each.why}" for each in unknown[:_MOST_NAMES])
        lines.append(f"UNKNOWN: {len(unknown)} versions cannot be read and may matter, such as {shown}")
    if doubtful:
        lines.append(f"{len(doubtful)} more checkpoints may descend from these, such as {doubtful[0]}")
    return lines
