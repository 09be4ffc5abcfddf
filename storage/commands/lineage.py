"""`lineage`: shows the ancestors of a version, or its descendants."""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from storage.commands.output import Output, size, table
from storage.objects.store import Store
from storage.versions import aliases
from storage.versions.lineage import ancestors, descendants

if TYPE_CHECKING:
    from rich.table import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("version", metavar="VERSION")
    parser.add_argument(
        "--up", action="store_true", help="show what was made from it, instead of what it was made from"
    )


def run(store: Store, arguments: argparse.Namespace) -> Output:
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
