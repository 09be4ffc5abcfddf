"""`ls`: the newest versions, read from the catalog's end; the store is never listed."""

import argparse
from collections.abc import Iterator
from itertools import islice
from typing import get_args

from storage import catalog, layout, manifests
from storage.commands.output import Output, size, table
from storage.manifests import Kind, Manifest
from storage.store import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--last", type=int, default=10, metavar="N", help="how many; default 10")
    parser.add_argument("--run", help="of this run only")
    parser.add_argument("--kind", help=f"of this kind only: {', '.join(get_args(Kind))}")


def run(store: Store, arguments: argparse.Namespace) -> Output:
    """Newest first."""
    found = list(islice(_newest(store, arguments.run, arguments.kind), arguments.last))
    data = [
        {"version": m.version, "kind": m.kind, "created_at": m.created_at, "rows": m.rows, "bytes": m.bytes}
        for m in found
    ]
    rows = [(f"{m.created_at:%Y-%m-%d %H:%M:%S}", m.kind, m.version, m.rows or "", size(m.bytes)) for m in found]
    if not rows:
        return Output(data, [f"no such version in {store.root}"])
    return Output(data, [table(["created (UTC)", "kind", "version", "rows", "size"], rows)])


def _newest(store: Store, run_name: str | None, kind: str | None) -> Iterator[Manifest]:
    seen = set()
    for entry in catalog.newest_first(store):
        wanted = (not kind or entry.kind == kind) and (not run_name or layout.run_of(entry.version) == run_name)
        if entry.kind == "alias" or not wanted or entry.version in seen:
            continue
        seen.add(entry.version)
        if manifest := manifests.find(store, entry.version):
            yield manifest
