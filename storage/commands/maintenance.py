"""The commands that check, clean and copy a store: `verify`, `gc`, `repair`, `doctor`, `export` and `cp`."""

import argparse
import importlib
from dataclasses import asdict
from functools import partial
from pathlib import Path

from storage.commands.program import Command, Output, no_arguments, print_progress, short, size, table, whole
from storage.errors import counted
from storage.maintenance import check_logs, copying, doctor, export, gc, verify
from storage.objects.store import Store, in_parallel
from storage.versions import aliases
from storage.versions.checkpoints import resolve_policy
from storage.versions.manifests import bytes_left


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("versions", metavar="VERSION", nargs="*", help="default: all versions and all logs")
    parser.add_argument("--deep", action="store_true", help="read every page and row of the data, and load the weights")
    parser.add_argument("--alone", action="store_true", help="do not check what the versions were made from")
    about = "make checkpoints K+1 to N of a run again from their parents and data sets, and compare; needs no VERSION"
    parser.add_argument("--replay", metavar="RUN@K..N", help=about)
    parser.add_argument("--cache", default="./var/cache", metavar="FOLDER", help="where --replay keeps files")


def run_verify(store: Store, arguments: argparse.Namespace) -> Output:
    """Check versions, and all logs if no version is given; the status is 1 if there is a problem."""
    if arguments.replay:
        return _replay(store, arguments)
    versions = [aliases.resolve_version(store, version) for version in arguments.versions]
    logs = check_logs.LogReport(versions) if versions else check_logs.check_logs(store)
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
    # The trainer is above the store, and needs torch.
    results = importlib.import_module("tasks.train.replay").replay(
        store, arguments.replay, arguments.cache, print_progress
    )
    rows = [(each.version, each.verdict, short(each.share), each.part, each.code) for each in results]
    columns = ["checkpoint", "", "difference / way of the update", "in", "made by other code"]
    bad = sum(not each.same for each in results)
    said = f"{counted(bad, 'checkpoint')} of {len(results)} cannot be made again" if bad else "made again"
    return Output([asdict(each) for each in results], [table(columns, rows), said], int(bool(bad)))


def _add_gc(parser: argparse.ArgumentParser) -> None:
    rules, add = gc.Rules(), parser.add_argument
    add("--delete", action="store_true", help="delete; without it only show what would be deleted")
    about = f"keep so many newest versions of each kind of a run; default {rules.keep_last}"
    add("--keep-last", type=whole(1), default=rules.keep_last, metavar="N", help=about)
    about = "also keep versions 0, M, 2M …; default: only 0"
    add("--keep-every", type=whole(0), default=0, metavar="M", help=about)
    about = "kind of versions to collect; may be repeated; default: checkpoint"
    add("--kind", action="append", choices=gc.KINDS, help=about)
    about = "collect leftovers of killed attempts older than this; default 24"
    add("--older-than-hours", type=whole(0), default=24, metavar="H", help=about)


def run_gc(store: Store, arguments: argparse.Namespace) -> Output:
    """Plan or delete; show one line for each run."""
    kinds, older_than_s = tuple(arguments.kind or gc.Rules().kinds), arguments.older_than_hours * 3600
    rules = gc.Rules(arguments.keep_last, arguments.keep_every, kinds, older_than_s)
    plans = gc.collect(store, rules, print_progress) if arguments.delete else gc.plan(store, rules)
    data = [
        {
            "run": plan.run,
            "held_by": plan.held_by,
            "versions": [manifest.version for manifest in plan.versions],
            "leftovers": [item.path for item in plan.leftovers],
            "bytes": plan.bytes,
        }
        for plan in plans
    ]
    if not plans:
        return Output(data, ["nothing to collect"])
    rows = [(p.run or "(no run)", len(p.versions), len(p.leftovers), size(p.bytes), p.held_by) for p in plans]
    columns = ["run", "versions", "leftover objects", "size", "left alone: written by"]
    if arguments.delete:  # progress has listed the versions already
        return Output(data, [table(columns, rows), "deleted"])
    versions = [f"  {manifest.version}" for plan in plans for manifest in plan.versions]
    return Output(data, [table(columns, rows), *versions, "nothing was deleted: --delete does it"])


def _add_repair(parser: argparse.ArgumentParser) -> None:
    about = "instead withdraw these, which lack objects, so that what made them (an evaluation, a run) makes them again"
    parser.add_argument("versions", metavar="VERSION", nargs="*", help=about)


def run_repair(store: Store, arguments: argparse.Namespace) -> Output:
    """Repair the logs, or withdraw versions, and show what was done. `verify` reports other problems."""
    if arguments.versions:
        names = [aliases.resolve_version(store, version) for version in arguments.versions]
        gone = [each for name in names for each in gc.withdraw(store, name)]
        return Output({"withdrawn": gone}, [f"withdrawn {name}" for name in gone])
    filled, entered = check_logs.repair(store)
    summary = (
        f"{counted(len(filled), 'lost entry')} filled, {counted(len(entered), 'version')} entered into the catalog"
    )
    lines = [*(f"filled {key}" for key in filled), *(f"entered {name}" for name in entered)]
    return Output({"filled": filled, "entered": entered}, [*lines, summary])


def run_doctor(store: Store, arguments: argparse.Namespace) -> Output:
    """Run all probes; the status is 1 if one of them found a problem."""
    checks = doctor.examine(store)
    rows = [(check.name, "ok" if check.ok else "PROBLEM", check.found, check.consequence) for check in checks]
    bad = sum(not check.ok for check in checks)
    verdict = counted(bad, "problem") if bad else f"{store.root} can be trusted with versions"
    shown = table(["check", "", "found", "what would go wrong"], rows)
    return Output([asdict(check) for check in checks], [shown, verdict], int(bool(bad)))


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("version", metavar="VERSION", help="a checkpoint")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="new or empty folder")
    about = "send it to this repository of the hub, too, with the token in HF_TOKEN; a new repository is private"
    parser.add_argument("--merge", action="store_true", help="write an adapter and its base as one plain model")
    parser.add_argument("--hub", metavar="OWNER/NAME", help=about)


def run_export(store: Store, arguments: argparse.Namespace) -> Output:
    """Write the folder and, if asked, send it to the hub."""
    policy = resolve_policy(store, arguments.version)
    export.export(store, policy, arguments.folder, merge=arguments.merge)
    parts = [f"{policy} is in {arguments.folder}, with its model card, README.md"]
    commit = export.send(arguments.folder, arguments.hub, policy) if arguments.hub else None
    parts += [f"sent: {commit}"] if commit else []
    return Output({"version": policy, "folder": str(arguments.folder), "commit": commit}, parts)


def _add_cp(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="name of the run")
    parser.add_argument("target", metavar="ROOT", help="local folder or s3://bucket/prefix to which it is copied")


def run_cp(store: Store, arguments: argparse.Namespace) -> Output:
    """Copy a run."""
    copied = copying.copy_run(store, Store(arguments.target), arguments.run, print_progress)
    versions, many = [manifest.version for manifest in copied], sum(in_parallel(partial(bytes_left, store), copied))
    summary = f"{counted(len(versions), 'version')} copied to {arguments.target} and read back, {size(many)}"
    return Output({"versions": versions, "bytes": many}, [f"{summary}; what was there already stays"])


COMMANDS = {
    "verify": Command("check that versions and everything they were made from are whole", _add_verify, run_verify),
    "gc": Command("show data that are not needed any more; delete them with --delete", _add_gc, run_gc),
    "repair": Command("replace lost and damaged entries of the catalog and of other logs", _add_repair, run_repair),
    "doctor": Command("check that a root can be trusted with versions: races, permissions", no_arguments, run_doctor),
    "export": Command("write a checkpoint as a folder with a model card; send it to the hub", _add_export, run_export),
    "cp": Command("copy a run with everything it needs to another root, where it can be continued", _add_cp, run_cp),
}
