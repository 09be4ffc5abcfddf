"""The commands that take something out of a store: `export` and `cp`."""

import argparse
from pathlib import Path

from storage.commands.program import Command, Output, print_progress, size
from storage.errors import counted
from storage.maintenance.copying import copy_run
from storage.maintenance.export import export as export_checkpoint
from storage.maintenance.export import send
from storage.objects.store import Store
from storage.versions.checkpoints import resolve_policy


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("version", metavar="VERSION", help="a checkpoint")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="new or empty folder")
    about = "send it to this repository of the hub, too, with the token in HF_TOKEN; a new repository is private"
    parser.add_argument("--hub", metavar="OWNER/NAME", help=about)


def export(store: Store, arguments: argparse.Namespace) -> Output:
    """Write the folder and, if asked, send it to the hub."""
    policy = resolve_policy(store, arguments.version)
    export_checkpoint(store, policy, arguments.folder)
    parts = [f"{policy} is in {arguments.folder}, with its model card, README.md"]
    commit = send(arguments.folder, arguments.hub, policy) if arguments.hub else None
    parts += [f"sent: {commit}"] if commit else []
    return Output({"version": policy, "folder": str(arguments.folder), "commit": commit}, parts)


def _add_cp(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="name of the run")
    parser.add_argument("target", metavar="ROOT", help="local folder or s3://bucket/prefix to which it is copied")


def cp(store: Store, arguments: argparse.Namespace) -> Output:
    """Copy a run."""
    copied = copy_run(store, Store(arguments.target), arguments.run, print_progress)
    versions, many = [manifest.version for manifest in copied], sum(manifest.bytes for manifest in copied)
    summary = f"{counted(len(versions), 'version')} copied to {arguments.target} and read back, {size(many)}"
    return Output({"versions": versions, "bytes": many}, [f"{summary}; what was there already stays"])


COMMANDS = {
    "export": Command(
        "write a checkpoint as a transformers folder with a model card; send it to the hub", _add_export, export
    ),
    "cp": Command("copy a run with everything it needs to another root, where it can be continued", _add_cp, cp),
}
