"""The commands that take something out of a store: `export` and `cp`."""

import argparse
from dataclasses import asdict
from pathlib import Path

from storage.commands.program import Command, Output, print_progress, size
from storage.maintenance.copying import copy_run
from storage.maintenance.export import export as export_checkpoint
from storage.maintenance.export import hub_token, send
from storage.objects.store import Store
from storage.versions.checkpoints import resolve_policy


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("version", metavar="VERSION", help="a checkpoint")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="new or empty folder")
    about = "send it to this repository of the hub, too, with the token in HF_TOKEN; a new repository is private"
    parser.add_argument("--hub", metavar="OWNER/NAME", help=about)


def export(store: Store, arguments: argparse.Namespace) -> Output:
    """Write the folder and, if asked, send it to the hub. The token is looked for first."""
    folder, token = arguments.folder, hub_token(arguments.hub) if arguments.hub else ""
    policy = resolve_policy(store, arguments.version)
    export_checkpoint(store, policy, folder)
    data = {"version": policy, "folder": str(folder)}
    parts = [f"{policy} is in {folder}, with its model card, README.md"]
    if arguments.hub:
        data["commit"] = send(folder, arguments.hub, token, policy)
        parts.append(f"sent: {data['commit']}")
    return Output(data, parts)


def _add_cp(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="name of the run")
    parser.add_argument("target", metavar="ROOT", help="local folder or s3://bucket/prefix to which it is copied")


def cp(store: Store, arguments: argparse.Namespace) -> Output:
    """Copy a run; the status is 1 if an alias of its versions points elsewhere there."""
    target = Store(arguments.target)
    copied = copy_run(store, target, arguments.run, print_progress)
    summary = f"{len(copied.versions)} versions copied to {target.root} and read back, {size(copied.bytes)}"
    parts = [f"{summary}; {copied.there} were there already"]
    for name, points in copied.aliases.items():
        parts.append(f"alias {name} points {'at it there' if points else 'elsewhere there, and was left alone'}")
    return Output(asdict(copied), parts, int(not all(copied.aliases.values())))


COMMANDS = {
    "export": Command(
        "write a checkpoint as a transformers folder with a model card; send it to the hub", _add_export, export
    ),
    "cp": Command("copy a run with everything it needs to another root, where it can be continued", _add_cp, cp),
}
