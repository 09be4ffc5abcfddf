"""`alias`: lists, sets and rolls back names that point at versions."""

import argparse
from dataclasses import asdict

from storage.commands.arguments import whole
from storage.commands.output import Output, print_error, table
from storage.errors import StorageError
from storage.objects.store import Store
from storage.versions import aliases
from storage.versions.aliases import Move


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    actions.add_parser("ls", help="list all aliases (the default ACTION)")
    point = actions.add_parser("set", help="point NAME at VERSION")
    point.add_argument("name", metavar="NAME")
    point.add_argument("version", metavar="VERSION")
    point.add_argument(
        "--expect",
        type=whole(-1),
        metavar="MOVE",
        help="only if MOVE is its newest move; -1: only if the alias does not exist yet",
    )
    past = actions.add_parser("history", help="all moves of NAME: where it pointed, who moved it, and why")
    past.add_argument("name", metavar="NAME")
    rollback = actions.add_parser("rollback", help="point NAME where it pointed before")
    former = actions.add_parser("back")  # the former name of `rollback`, which help does not list
    for action in (rollback, former):
        action.set_defaults(action="rollback")
        action.add_argument("name", metavar="NAME")
        action.add_argument("--to", type=whole(0), metavar="MOVE", help="point it where it pointed after this move")
    for action in (point, rollback, former):
        action.add_argument("--reason", default="", help="stored in the history")


def run(store: Store, arguments: argparse.Namespace) -> Output:
    """Run the action and show the moves. Damaged aliases are printed as errors; the others are listed; status 1."""
    if arguments.action == "set":
        return _output(arguments.name, [_set(store, arguments)])
    if arguments.action == "rollback":
        return _output(arguments.name, [aliases.roll_back(store, arguments.name, arguments.to, arguments.reason)])
    if arguments.action == "history":
        moves = aliases.history(store, arguments.name)
        if not moves:
            raise StorageError(f"there is no alias {arguments.name!r}; there are: {', '.join(aliases.names(store))}")
        return _output(arguments.name, moves)
    moved, damaged = aliases.read_undamaged(store)
    for error in damaged:
        print_error(error)
    rows = [(name, move.version, move.number, move.at, move.by, move.reason) for name, move in moved.items()]
    parts = [table(["alias", "version", "move", "at", "by", "reason"], rows) if rows else "no aliases yet"]
    return Output({name: asdict(move) for name, move in moved.items()}, parts, int(bool(damaged)))


def _set(store: Store, arguments: argparse.Namespace) -> Move:
    name, version = arguments.name, aliases.resolve_version(store, arguments.version)
    if arguments.expect is None:
        newest = aliases.current(store, name)
        expected = newest.number if newest else None
    else:  # the newest move is not read, so an alias whose newest move is damaged can be set
        expected = None if arguments.expect < 0 else arguments.expect
    return aliases.move(store, name, version, expected, arguments.reason)


def _output(name: str, moves: list[Move]) -> Output:
    rows = [(move.number, move.version, move.at, move.by, move.reason) for move in moves]
    shown = table(["move", "version", "at", "by", "reason"], rows, title=f"alias {name}")
    return Output([asdict(move) for move in moves], [shown])
