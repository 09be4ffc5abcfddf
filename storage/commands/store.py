"""The commands of `python -m storage`: they show versions, move aliases, and check, clean and copy a store."""

import argparse
import importlib
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, get_args

from rich.table import Table

from configs import changed, flatten
from storage import layout
from storage.commands.program import Command, Output, print_error, print_progress, short, size, table, whole
from storage.errors import DamagedError, StorageError, counted
from storage.logs import catalog
from storage.maintenance import copying, doctor, export, gc, verify
from storage.objects.store import Store, in_parallel
from storage.versions import aliases, checkpoints, manifests
from storage.versions.lineage import climb_down, descendants
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
    nodes = descendants(store, version) if arguments.up else climb_down(store, [version])
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
    differing = {
        "config": changed(left.settings, right.settings),
        "metrics": changed(left.metrics, right.metrics),
        "own_code": changed(left.code, right.code),
    }
    parts: list[Any] = [f"code: {left.code_version} -> {right.code_version}"]
    for name, rows in differing.items():
        if rows:
            parts.append(table([name, left.version, right.version], [(key, short(a), short(b)) for key, a, b in rows]))
    if not differing["config"]:
        parts.append("the same configuration")
    return Output({name: {key: [a, b] for key, a, b in rows} for name, rows in differing.items()}, parts)


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
    rollback.add_argument("--to", type=whole(0), metavar="MOVE", help="point it where it pointed after this move")


def alias(store: Store, arguments: argparse.Namespace) -> Output:
    """Run the action and show the moves."""
    name = getattr(arguments, "name", "")
    if arguments.action == "set":
        version, count = aliases.resolve_version(store, arguments.version), aliases.moves(store, name)
        moves = [aliases.move(store, name, version, count - 1 if count else None, arguments.reason)]
    elif arguments.action == "rollback":
        moves = [aliases.roll_back(store, name, arguments.to, arguments.reason)]
    elif arguments.action == "history":
        if not (moves := aliases.history(store, name)):
            raise StorageError(f"there is no alias {name!r}; there are: {', '.join(aliases.names(store))}")
    else:
        newest = aliases.newest(store)
        shown = _moves(newest.items()) if newest else "no aliases yet"
        return Output({name: asdict(move) for name, move in newest.items()}, [shown])
    return Output([asdict(move) for move in moves], [_moves((name, move) for move in moves)])


def _moves(moves: Iterable[tuple[str, aliases.Move]]) -> Table:
    rows = [(name, move.version, move.number, move.at, move.by, move.reason) for name, move in moves]
    return table(["alias", "version", "move", "at", "by", "reason"], rows)


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("versions", metavar="VERSION", nargs="*", help="default: all versions and all logs")
    parser.add_argument("--deep", action="store_true", help="read every page and row of the data, and load the weights")
    parser.add_argument("--alone", action="store_true", help="do not check what the versions were made from")
    about = "make checkpoints K+1 to N of a run again from their parents and data sets, and compare; needs no VERSION"
    parser.add_argument("--replay", metavar="RUN@K..N", help=about)


def run_verify(store: Store, arguments: argparse.Namespace) -> Output:
    """Check versions, and all logs if no version is given; the status is 1 if there is a problem."""
    if arguments.replay:
        return _replay(store, arguments)
    versions = [aliases.resolve_version(store, version) for version in arguments.versions]
    logs = verify.LogReport(versions) if versions else verify.check_logs(store)
    report = verify.verify(store, logs.versions, print_progress, deep=arguments.deep, ancestors=not arguments.alone)
    report.findings[:0] = logs.findings
    rows = [(finding.version, finding.object, finding.problem) for finding in report.findings]
    parts = [table(["version", "object", "problem"], rows)] if rows else []
    gone = f" ({report.collected} of them collected by gc)" if report.collected else ""
    checked = f"{counted(report.versions, 'version')}{gone}, {counted(report.objects, 'object')}, {size(report.bytes)}"
    result = counted(len(report.findings), "problem") if report.findings else "whole"
    return Output(asdict(report), [*parts, f"{result}: {checked}"], int(bool(report.findings)))


def _replay(store: Store, arguments: argparse.Namespace) -> Output:
    """Make checkpoints again; the status is 1 if one is not the stored one."""
    replay = importlib.import_module("tasks.train.replay").replay  # the trainer is above the store, and needs torch
    results = replay(store, arguments.replay, arguments.cache, print_progress)
    rows = [(each.version, each.verdict, short(each.share), each.part, each.code) for each in results]
    columns = ["checkpoint", "", "difference / way of the update", "in", "made by other code"]
    bad = sum(not each.same for each in results)
    summary = f"{counted(bad, 'checkpoint')} of {len(results)} cannot be made again" if bad else "made again"
    return Output([asdict(each) for each in results], [table(columns, rows), summary], int(bool(bad)))


def _add_gc(parser: argparse.ArgumentParser) -> None:
    rules, add = gc.Rules(), parser.add_argument
    add("--delete", action="store_true", help="delete; without it only show what would be deleted")
    about = f"keep so many newest versions of each kind of a run; default {rules.keep_last}"
    add("--keep-last", type=whole(1), default=rules.keep_last, metavar="N", help=about)
    about = "also keep versions 0, M, 2M …; default: only 0"
    add("--keep-every", type=whole(0), default=0, metavar="M", help=about)
    about = "collect leftovers of killed attempts older than this; default 24"
    add("--older-than-hours", type=whole(0), default=24, metavar="H", help=about)


def run_gc(store: Store, arguments: argparse.Namespace) -> Output:
    """Show or delete; one line for each run."""
    rules = gc.Rules(arguments.keep_last, arguments.keep_every, arguments.older_than_hours * 3600)
    garbage = gc.collect(store, rules, print_progress) if arguments.delete else gc.find_garbage(store, rules)
    data = [
        {
            "run": found.run,
            "held_by": found.held_by,
            "versions": [manifest.version for manifest in found.versions],
            "leftovers": [item.path for item in found.leftovers],
            "bytes": found.bytes,
        }
        for found in garbage
    ]
    if not garbage:
        return Output(data, ["nothing to collect"])
    rows = [(of.run or "(no run)", len(of.versions), len(of.leftovers), size(of.bytes), of.held_by) for of in garbage]
    shown = table(["run", "versions", "leftover objects", "size", "left alone: written by"], rows)
    if arguments.delete:  # progress has listed the versions already
        return Output(data, [shown, "deleted"])
    versions = [f"  {manifest.version}" for found in garbage for manifest in found.versions]
    return Output(data, [shown, *versions, "nothing was deleted: --delete does it"])


def run_repair(store: Store, arguments: argparse.Namespace) -> Output:
    """Repair the catalog, and show what was done. `verify` reports other problems."""
    filled, entered = verify.repair(store)
    done = f"{counted(len(filled), 'lost entry')} filled, {counted(len(entered), 'version')} entered into the catalog"
    lines = [*(f"filled {key}" for key in filled), *(f"entered {name}" for name in entered)]
    return Output({"filled": filled, "entered": entered}, [*lines, done])


def run_doctor(store: Store, arguments: argparse.Namespace) -> Output:
    """Show what works, and the first problem, with status 1."""
    works, problem = dict[str, str](), ""
    try:
        for name, found in doctor.examine(store):
            works[name] = found
    except StorageError as error:
        problem = str(error)
    verdict = f"PROBLEM: {problem}" if problem else f"{store.root} can be trusted with versions"
    shown = table(["check", "found"], works.items())
    return Output({"works": works, "problem": problem}, [shown, verdict], int(bool(problem)))


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("version", metavar="VERSION", help="a checkpoint")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="new or empty folder")
    parser.add_argument("--merge", action="store_true", help="write an adapter and its base as one plain model")


def run_export(store: Store, arguments: argparse.Namespace) -> Output:
    """Write the folder."""
    policy = checkpoints.resolve_policy(store, arguments.version)
    export.export(store, policy, arguments.folder, merge=arguments.merge)
    line = f"{policy} is in {arguments.folder}, with its model card; `hf upload --private` sends it to the hub"
    return Output({"version": policy, "folder": str(arguments.folder)}, [line])


def _add_cp(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="name of the run")
    parser.add_argument("target", metavar="ROOT", help="local folder or s3://bucket/prefix to which it is copied")


def run_cp(store: Store, arguments: argparse.Namespace) -> Output:
    """Copy a run."""
    copied = copying.copy_run(store, Store(arguments.target), arguments.run, print_progress)
    versions = [manifest.version for manifest in copied]
    many = sum(in_parallel(partial(manifests.bytes_left, store), copied))
    summary = f"{counted(len(versions), 'version')} copied to {arguments.target} and read back, {size(many)}"
    return Output({"versions": versions, "bytes": many}, [f"{summary}; what was there already stays"])


COMMANDS = {
    "ls": Command("list the newest versions", _add_ls, ls),
    "show": Command("show one version: files, parents, metrics, configuration", _add_show, show),
    "lineage": Command("show what a version was made from, or what was made from it", _add_lineage, lineage),
    "diff": Command("show how configuration and metrics of two versions differ", _add_diff, diff),
    "alias": Command("names that point at versions: list, set, history, rollback", _add_alias, alias),
    "verify": Command("check that versions and everything they were made from are whole", _add_verify, run_verify),
    "gc": Command("show data that are not needed any more; delete them with --delete", _add_gc, run_gc),
    "repair": Command("replace lost and damaged entries of the catalog", lambda _: None, run_repair),
    "doctor": Command("check that a root can be trusted with versions: races, permissions", lambda _: None, run_doctor),
    "export": Command("write a checkpoint as a folder with a model card", _add_export, run_export),
    "cp": Command("copy a run with everything it needs to another root, where it can be continued", _add_cp, run_cp),
}
