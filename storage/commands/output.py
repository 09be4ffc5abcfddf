"""Output of commands: tables for people, JSON for scripts."""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from storage.visible import printable

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 140
"""Least width of tables if the output is not a terminal."""


@dataclass(frozen=True, slots=True)
class Output:
    """The result of a command.

    Args:
        data: what `--json` prints.
        parts: tables and lines, in order.
        status: exit status; 1 if a problem was found.
    """

    data: Any
    parts: Sequence["Table | str"] = field(default_factory=list)
    status: int = 0

    def print(self, *, as_json: bool) -> None:
        if as_json:
            json.dump(self.data, sys.stdout, indent=1, default=str)
            print()
            return
        from rich.console import Console

        console = Console(highlight=False)
        console.width = max(console.width, _WIDTH) if not console.is_terminal else console.width
        for part in self.parts:
            console.print(printable(part) if isinstance(part, str) else part, markup=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> "Table":
    """Make a table. Text in it is not read as markup and cannot move the cursor; names are never cut."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    def text(cell: Any) -> Text:
        return Text("" if cell is None else printable(str(cell)))

    made = Table(title=text(title) if title else None, title_justify="left", box=SIMPLE_HEAD)
    for column in columns:
        made.add_column(text(column), overflow="fold")
    for row in rows:
        made.add_row(*map(text, row))
    return made


def short(value: Any) -> Any:
    """Format a float for people; return anything else unchanged."""
    return f"{value:.5g}" if isinstance(value, float) else value


def size(count: float) -> str:
    """Format a number of bytes for people.

    >>> size(1_500_000)
    '1.5 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def print_progress(line: str) -> None:
    """Print a line of progress to standard error."""
    print(printable(line), file=sys.stderr, flush=True)


def print_error(error: BaseException) -> None:
    """Print why a command failed, to standard error."""
    print_progress(f"error: {error}")
