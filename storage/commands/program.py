"""Command lines: the parser of all of them, programs of several commands such as `python -m storage`, and their output.

Tables are for people, JSON (`--json`) is for scripts.
"""

import argparse
import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD, Box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from storage.interrupts import reader_may_go
from storage.objects.store import Store
from storage.processes.folder import keep_compiled_code_private
from storage.visible import Fleeting, print_clean_logs, printable, without_secrets

_WIDTH = 140
"""Least width of tables if the output is not a terminal."""


class Parser(argparse.ArgumentParser):
    """A parser that accepts options between several positional arguments: `verify demo/latest --deep champion`.

    One that has `--root R` also reads `storage.root=R`, with or without quotes. The parsers of its commands are of this
    type, too.
    """

    _mixing = False

    def parse_known_args(  # type: ignore[override]  # the overloads differ in what they return for a namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse intermixed arguments. argparse calls this for the whole line, and again for a command in it."""
        if "--root" in self._option_string_actions:
            words = sys.argv[1:] if args is None else args
            args = [re.sub(r"""^storage\.root=(["']?)(.*)\1$""", r"--root=\2", word) for word in words]
        if self._mixing or self._subparsers is not None:  # intermixed parsing does not support commands
            return super().parse_known_args(args, namespace)
        self._mixing = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._mixing = False


def whole(least: int) -> Callable[[str], int]:
    """Return the `type` of an argument that is a whole number, at least `least`."""

    def read(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,18}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return read


def positive(text: str) -> float:
    """Read an argument that is a number above 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError(text)
    return number


@dataclass(frozen=True, slots=True)
class Output:
    """The result of a command.

    Args:
        data: what `--json` prints.
        parts: tables and lines, in order.
        status: exit status; 1 if a problem was found.
    """

    data: Any
    parts: Sequence[Table | str] = field(default_factory=list)
    status: int = 0

    def print(self, *, as_json: bool) -> None:
        with reader_may_go():
            if as_json:
                json.dump(self.data, sys.stdout, indent=1, default=str)
                print()
                return
            console = Console(highlight=False)
            console.width = max(console.width, _WIDTH) if not console.is_terminal else console.width
            for part in self.parts:
                is_line = isinstance(part, str)  # it may hold a command to copy, so it is not wrapped
                console.print(printable(part) if isinstance(part, str) else part, markup=False, soft_wrap=is_line)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "", box: Box | None = None) -> Table:
    """Make a table. Text in it is not read as markup and cannot move the cursor; names are never cut."""

    def text(cell: Any) -> Text:
        return Text("" if cell is None else printable(str(cell)))

    made = Table(title=text(title) if title else None, title_justify="left", box=box or SIMPLE_HEAD)
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
    return decimal(int(count))


def print_progress(line: str) -> None:
    """Print a line of progress to standard error; a fleeting one on a terminal only."""
    if sys.stderr.isatty() or not isinstance(line, Fleeting):
        print(printable(line), file=sys.stderr, flush=True)


def print_error(error: BaseException) -> None:
    """Print why a command failed, to standard error."""
    print_progress(f"error: {without_secrets(str(error))}")


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a program: the help text, what declares its arguments, and what does its work."""

    about: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Store, argparse.Namespace], Output]


def run_command(
    commands: Mapping[str, Command],
    program: str,
    about: str | None,
    epilog: str,
    open_store: Callable[[argparse.Namespace], Store] = lambda arguments: Store(arguments.root),
) -> int:
    """Parse `sys.argv`, run the command that it names, print its output and return the exit status.

    After an error, which is printed, the status is 1; otherwise the command chooses it. Wrong arguments end the
    process with status 2.

    Args:
        commands: the commands of the program by name.
        program: how the program is called, such as `python -m storage`.
        about: the text whose first line says what the program does.
        epilog: the text after the help of the program.
        open_store: opens the store on which the command works.
    """
    arguments = _parse(commands, program, (about or "").partition("\n")[0], epilog)
    keep_compiled_code_private()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    print_clean_logs()
    try:
        output: Output = arguments.act(open_store(arguments), arguments)
        output.print(as_json=arguments.json)
    except (ValueError, OSError) as error:
        print_error(error)
        return 1
    return output.status


def _parse(commands: Mapping[str, Command], program: str, about: str, epilog: str) -> argparse.Namespace:
    """Parse the line. The shared options may also come after a command."""
    shared = Parser(add_help=False, allow_abbrev=False)
    root = "local folder or s3://bucket/prefix; default ./var; also as storage.root=ROOT, as in the flows"
    shared.add_argument("--root", default="./var", help=root)
    cache = "folder for data of a remote root; default ./var/cache"
    shared.add_argument("--cache", default="./var/cache", help=cache)
    shared.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser = Parser(prog=program, description=about, epilog=epilog, parents=[shared])
    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    others = f"Options of all commands, such as --root: {program} --help"
    for name, command in commands.items():
        sentence = f"{command.about[0].upper()}{command.about[1:]}."
        subparser = parsers.add_parser(name, help=command.about, description=sentence, epilog=others)
        subparser.set_defaults(act=command.run)  # not `run`, which is an option
        command.add_arguments(subparser)
    namespace, rest = shared.parse_known_args()
    return parser.parse_args(rest, namespace)
