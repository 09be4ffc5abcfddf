"""`read`: show trajectories in the browser, with the cases that an audit found."""

import argparse
from pathlib import Path

from configs.audit import Audit
from storage.commands.program import Output
from storage.logs import catalog
from storage.objects.store import Store
from storage.versions import manifests
from tasks.audit.reader.serve import serve
from tasks.audit.record import REPORT, read_audit
from tasks.audit.selection import parse_since, split_uri

_PORT = 8600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="RUN|URI|AUDIT",
        help="runs, versions or URIs of trajectories, or one audit (audits/…) with its cases; default: all runs",
    )
    parser.add_argument(
        "--since", default="", help="show only data sets committed since a date, or within a duration: 12h, 7d, 2w"
    )
    parser.add_argument("--port", type=int, default=_PORT, help=f"default {_PORT}; 0: any free port")


def run(store: Store, arguments: argparse.Namespace) -> Output:
    """Serve the reader until Ctrl-C."""
    roots = [root for target in arguments.targets if (root := split_uri(target)[0])]
    store = Store(roots[0]) if roots else store
    targets, cache, audit = [split_uri(target)[1] for target in arguments.targets], Path(arguments.cache), None
    audits = [target for target in targets if target.startswith("audits/")]
    if audits and len(targets) > 1:
        raise ValueError(f"{audits[0]} already names its data sets: give it alone, without {len(targets) - 1} others")
    if audits:
        _, audit = read_audit(store, audits[0], cache)
        kinds = {entry.version: entry.kind for entry in catalog.read_all(store)}  # works if a manifest is damaged, too
        parents = [parent.version for parent in manifests.read(store, audits[0]).parents]
        targets = [version for version in parents if kinds.get(version) != "scores"]
        if not targets:
            raise ValueError(f"{audits[0]} could not read any data set: see its report, {audit / REPORT}")
    serve(store, targets, parse_since(arguments.since), cache, Audit(), arguments.port, audit)
    return Output({})
