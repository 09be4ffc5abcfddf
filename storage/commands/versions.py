"""The commands that show versions and move aliases: `ls`, `show`, `lineage`, `diff` and `alias`."""

import argparse
from dataclasses import asdict
from functools import partial
from typing import Any, get_args

from rich.table import Table

from configs import flatten
from storage import layout
from storage.commands.program import Command, Output, print_error, short, size, table, whole
from storage.errors import DamagedError, StorageError, counted
from storage.logs import catalog
from storage.objects.store import Store, in_parallel
from storage.versions import aliases, manifests
from storage.versions.aliases import Move
from storage.versions.lineage import ancestors, descendants
from storage.versions.manifests import Kind, Manifest


def _add_ls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--last", type=whole(1), default=10, metavar="N", help="number of versions; default 10")
    parser.add_argument("--run", help="only versions of this run")
    parser.add_argument("--kind", help=f"only versions of this kind: {', '.join(get_args(Kind))}")


def ls(store: Store, arguments: argparse.Namespace) -> Output:
    """List versions, newest first, with the size of what gc left. Damaged ones are printed as errors; status 1."""
    found: list[Manifest] = []
    seen, status = set[str](), 0
    for entry in catalog.newest_first(store):
        try:
            if isinstance(entry, DamagedError):
                raise entry
            wanted = arguments.kind in (None, entry.kind) and arguments.run in (None, layout.run_of(entry.version))
            if wanted and entry.version not in seen:
                seen.add(entry.version)
                found += filter(None, [manifests.find(store, entry.version)])
        except DamagedError as error:
            print_error(error)
            status = 1
        if len(found) == arguments.last:
            break
    there = in_parallel(partial(manifests.bytes_left, store), found)
    keys = "created_at", "kind", "version", "rows"
    data = [{key: getattr(m, key) for key in keys} | {"bytes": many} for m, many in zip(found, there, strict=True)]
    rows = [
        (f"{at:%Y-%m-%d %H:%M:%S}", *named, many or "", size(left)) for at, *named, many, left in map(dict.values, data)
    ]
    shown = table(["created (UTC)", "kind", "version", "rows", "size"], rows)
    return Output(data, [shown if rows else f"no such version in {store.root}"], status)


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("version", metavar="VERSION")
    parser.add_argument("--config", action="store_true", help="show the resolved configuration, too")


def show(store: Store, arguments: argparse.Namespace) -> Output:
    """Show the manifest as tables."""
    manifest = manifests.read(store, aliases.resolve_version(store, arguments.version))
    left = manifests.left(store, manifest)
    rest = "" if left == manifest.files else "; the others were collected by gc"
    head = [
        ("version", store.uri(manifest.version)),
        ("kind", manifest.kind),
        ("created", f"{manifest.created_at:%Y-%m-%d %H:%M:%S} UTC"),
        ("code", manifest.code_version),
        *(("own code", f"{path} {digest if ':' in digest else digest[:16]}") for path, digest in manifest.code.items()),
        ("flow run", manifest.prefect_run_id),
        ("fencing token", manifest.fence),
        ("data", f"{counted(len(left), 'object')}, {size(sum(file.bytes for file in left))}{rest}"),
        *(("parent", parent) for parent in manifest.parent_names),
        *([("adapter of", manifest.base.version)] if manifest.base else []),
    ]
    parts = [table(["", ""], head)]
    if manifest.files:
        files = [(file.name, size(file.bytes), file.rows, file.sha256[:16]) for file in manifest.files]
        parts.append(table(["file", "size", "rows", "sha256"], files))
    if manifest.metrics:
        parts.append(table(["metric", "value"], [(key, short(value)) for key, value in flatten(manifest.metrics)]))
    if arguments.config:
        parts.append(table(["setting", "value"], flatten(manifest.config)))
    data = manifest.model_dump(mode="json") | {"collected": left != manifest.files}
    return Output(data if arguments.config else {k: v for k, v in data.items() if k != "config"}, parts)


def _add_lineage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("version", metavar="VERSION")
    about = "show what was made from it, instead of what it was made from"
    parser.add_argument("--up", action="store_true", help=about)


def lineage(store: Store, arguments: argparse.Namespace) -> Output:
    """Show the nearest versions first; `distance` counts the steps between."""
    version = aliases.resolve_version(store, arguments.version)
    nodes = descendants(store, version) if arguments.up else ancestors(store, version)
    rows = [
        (node.depth, node.kind, node.version, node.rows or "", size(node.bytes), ", ".join(node.parents))
        for node in nodes
    ]
    parts: list[Table | str] = [table(["distance", "kind", "version", "rows", "size", "made from"], rows)]
    parts += [f"PROBLEM: {node.version}: {node.problem}" for node in nodes if node.problem]
    return Output([asdict(node) for node in nodes], parts, int(len(parts) > 1))


def _add_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("left", metavar="VERSION")
    parser.add_argument("right", metavar="VERSION")


def diff(store: Store, arguments: argparse.Namespace) -> Output:
    """Show only differences. A knob that one version does not have counts with its default."""
    named = (arguments.left, arguments.right)
    left, right = (manifests.read(store, aliases.resolve_version(store, name)) for name in named)
    changed = {
        "config": _changed(left.settings, right.settings),
        "metrics": _changed(left.metrics, right.metrics),
        "own_code": _changed(left.code, right.code),
    }
    parts: list[Any] = [f"code: {left.code_version} -> {right.code_version}"]
    for name, rows in changed.items():
        if rows:
            parts.append(table([name, left.version, right.version], [(key, short(a), short(b)) for key, a, b in rows]))
    if not changed["config"]:
        parts.append("the same configuration")
    return Output({name: {key: [a, b] for key, a, b in rows} for name, rows in changed.items()}, parts)


def _changed(left: dict[str, Any], right: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    a, b = dict(flatten(left)), dict(flatten(right))
    return [(key, a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)]


def _add_alias(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    actions.add_parser("ls", help="list all aliases (the default ACTION)")
    point = actions.add_parser("set", help="point NAME at VERSION")
    past = actions.add_parser("history", help="all moves of NAME: where it pointed, who moved it, and why")
    rollback = actions.add_parser("rollback", help="point NAME where it pointed before")
    for action in (point, past, rollback):
        action.add_argument("name", metavar="NAME")
    for action in (point, rollback):
        action.add_argument("--reason", default="", help="stored in the history")
    point.add_argument("version", metavar="VERSION")
    about = "only if MOVE is its newest move; -1: only if the alias does not exist yet"
    point.add_argument("--expect", type=whole(-1), metavar="MOVE", help=about)
    rollback.add_argument("--to", type=whole(0), metavar="MOVE", help="point it where it pointed after this move")


def alias(store: Store, arguments: argparse.Namespace) -> Output:
    """Run the action and show the moves. Damaged aliases are printed as errors; the others are listed; status 1."""
    name = getattr(arguments, "name", "")
    if arguments.action == "set":
        version, expected = aliases.resolve_version(store, arguments.version), arguments.expect
        if expected is None:  # otherwise the newest move is not read, so an alias can be set although it is damaged
            expected = newest.number if (newest := aliases.current(store, name)) else None
        expected = None if expected == -1 else expected
        return _moves(name, [aliases.move(store, name, version, expected, arguments.reason)])
    if arguments.action == "rollback":
        return _moves(name, [aliases.roll_back(store, name, arguments.to, arguments.reason)])
    if arguments.action == "history":
        if not (moves := aliases.history(store, name)):
            raise StorageError(f"there is no alias {name!r}; there are: {', '.join(aliases.names(store))}")
        return _moves(name, moves)
    moved, status = dict[str, Move](), 0
    for alias_name, length in aliases.names(store).items():
        try:
            if newest := aliases.current(store, alias_name, length):
                moved[alias_name] = newest
        except DamagedError as error:
            print_error(error)
            status = 1
    rows = [(name, move.version, move.number, move.at, move.by, move.reason) for name, move in moved.items()]
    parts = [table(["alias", "version", "move", "at", "by", "reason"], rows) if rows else "no aliases yet"]
    return Output({name: asdict(move) for name, move in moved.items()}, parts, status)


def _moves(name: str, moves: list[Move]) -> Output:
    rows = [(move.number, move.version, move.at, move.by, move.reason) for move in moves]
    shown = table(["move", "version", "at", "by", "reason"], rows, title=f"alias {name}")
    return Output([asdict(move) for move in moves], [shown])


COMMANDS = {
    "ls": Command("list the newest versions", _add_ls, ls),
    "show": Command("show one version: files, parents, metrics, configuration", _add_show, show),
    "lineage": Command("show what a version was made from, or what was made from it", _add_lineage, lineage),
    "diff": Command("show how configuration and metrics of two versions differ", _add_diff, diff),
    "alias": Command("names that point at versions: list, set, history, rollback", _add_alias, alias),
}
