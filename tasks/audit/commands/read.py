"""`read`: trajectories in the browser, with what an audit says of them."""

import argparse
from pathlib import Path

from storage.commands.output import Output
from storage.objects.store import Store

_PORT = 8600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="RUN|URI|AUDIT",
        help="runs, versions or URIs of trajectories, or one audit (audits/…) with what it found; default: all runs",
    )
    parser.add_argument("--since", default="", help="only what was committed since a date, or so long ago: 12h, 7d, 2w")
    parser.add_argument("--port", type=int, default=_PORT, help=f"default {_PORT}; 0: any that is free")


def run(store: Store, arguments: argparse.Namespace) -> Output:
    """Until Ctrl-C."""
    from configs.audit import Audit
    from storage.logs import catalog
    from storage.versions import manifests
    from tasks.audit.reader.serve import serve
    from tasks.audit.record import REPORT, read_audit
    from tasks.audit.selection import since, split_uri

    roots = [root for target in arguments.targets if (root := split_uri(target)[0])]
    store = Store(roots[0]) if roots else store
    targets, cache, audit = [split_uri(target)[1] for target in arguments.targets], Path(arguments.cache), None
    audits = [target for target in targets if target.startswith("audits/")]
    if audits and len(targets) > 1:
        raise ValueError(f"{audits[0]} says itself what it is about: give it alone, without {len(targets) - 1} others")
    if audits:
        _, audit = read_audit(store, audits[0], cache)
        kinds = {entry.version: entry.kind for entry in catalog.read_all(store)}  # whatever became of the manifests
        parents = [parent.version for parent in manifests.read(store, audits[0]).parents]
        targets = [version for version in parents if kinds.get(version) != "scores"]
        if not targets:
            raise ValueError(f"{audits[0]} could read no data set: look at its report, {audit / REPORT}")
    serve(store, targets, since(arguments.since), cache, Audit(), arguments.port, audit)
    return Output({})
