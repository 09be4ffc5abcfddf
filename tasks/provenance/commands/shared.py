"""What the commands have in common: how a problem is named, and how answers are shown."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from storage.commands.arguments import whole
from storage.commands.output import table
from storage.visible import visible

if TYPE_CHECKING:
    from rich.table import Table

    from tasks.provenance.answers import FirstTrained, Unknown
    from tasks.provenance.asked import FoundProblem

_PROMPT = 200
_NAMED = 3


def add_problem(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """PROBLEM, --prompt and --run."""
    parser.add_argument("problem", metavar="PROBLEM", nargs="?" if optional else None)
    parser.add_argument("--prompt", action="store_true", help="PROBLEM is a part of its prompt")
    parser.add_argument("--run", help="look only at what this run played")


def add_last(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("-n", "--last", type=whole(0), default=20, metavar="N", help=f"{what} shown; default 20")


def show_problem(asked: "FoundProblem") -> str:
    """Prompt, gold answers, ids and key on two lines."""
    prompt, gold = " ".join(asked.prompt.split()), "; ".join(asked.solutions)
    ids = ", ".join(asked.problem_ids[:_NAMED]) + (" …" if len(asked.problem_ids) > _NAMED else "")
    return f"{visible(prompt, _PROMPT)} -> {visible(gold, _PROMPT)}\nid {visible(ids)}, key {asked.key}"


def some(columns: Sequence[str], rows: Sequence[Sequence[Any]], most: int, title: str = "") -> "list[Table | str]":
    """The first rows as a table, and how many more there are."""
    left = len(rows) - most
    more = [f"  … and {left:,} more: -n {len(rows)}, or --json"] if left > 0 else []
    return [table(columns, rows[:most], title), *more] if rows else []


def show_first(first: "Sequence[FirstTrained]") -> "list[Table | str]":
    rows = [(each.run, each.checkpoint, each.checkpoints, each.clean or "none") for each in first]
    columns = ["run", "first checkpoint", "so many of the run", "last one before it"]
    return some(columns, rows, len(rows), "Trained on it, or descended from one that was")


def show_uncertain(doubtful: Sequence[str], unknown: "Sequence[Unknown]") -> list[str]:
    """What nobody can know any more."""
    lines = []
    if unknown:
        shown = "; ".join(f"{each.version}: {each.why}" for each in unknown[:_NAMED])
        lines.append(f"UNKNOWN: {len(unknown)} versions cannot be read and may matter, such as {shown}")
    if doubtful:
        lines.append(f"{len(doubtful)} more checkpoints may descend from these, such as {doubtful[0]}")
    return lines
