"""`ls`: lists the newest versions, read from the end of the catalog; the store itself is never listed."""

import argparse
from collections.abc import Iterator
from itertools import islice
from typing import get_args

from storage import layout
from storage.commands.arguments import whole
from storage.commands.output import Output, print_error, size, table
from storage.errors import DamagedError, StorageError
from storage.logs import catalog
from storage.objects.store import Store
from storage.versions import manifests
from storage.versions.manifests import Kind, Manifest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--last", type=whole(1), default=10, metavar="N", help="number of versions; default 10")
    parser.add_argument("--run", help="only versions of this run")
    parser.add_argument("--kind", help=f"only versions of this kind: {', '.join(get_args(Kind))}")


def run(store: Store, arguments: argparse.Namespace) -> Output:
    """List versions, newest first. Damaged ones are printed as errors, and the status is 1."""
    damaged: list[StorageError] = []
    found = list(islice(_newest(store, arguments.run, arguments.kind, damaged), arguments.last))
    for error in damaged:
        print_error(error)
    data = [
        {"version": m.version, "kind": m.kind, "created_at": m.created_at, "rows": m.rows, "bytes": m.bytes}
        for m in found
    ]
    rows = [(f"{m.created_at:%Y-%m-%d %H:%M:%S}", m.kind, m.version, m.rows or "", size(m.bytes)) for m in found]
    shown = table(["created (UTC)", "kind", "version", "rows", "size"], rows)
    return Output(data, [shown if rows else f"no such version in {store.root}"], int(bool(damaged)))


def _newest(store: Store, run_name: str | None, kind: str | None, damaged: list[StorageError]) -> Iterator[Manifest]:
    """Read the requested versions, newest first; add an error to `damaged` for each that cannot be read."""
    seen = set()
    for entry in catalog.newest_first(store):
        if isinstance(entry, StorageError):
            damaged.append(entry)
            continue
        wanted = (not kind or entry.kind == kind) and (not run_name or layout.run_of(entry.version) == run_name)
        if entry.kind == "alias" or not wanted or entry.version in seen:
            continue
        seen.add(entry.version)
        try:
            if manifest := manifests.find(store, entry.version):
                yield manifest
        except DamagedError as error:
            damaged.append(error)
