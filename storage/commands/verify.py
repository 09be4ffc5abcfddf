"""`verify`: is everything there, and is it what the manifests say?"""

import argparse
from dataclasses import asdict

from storage import aliases, catalog, manifests
from storage.commands.output import Output, say, size, table
from storage.store import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("versions", metavar="VERSION", nargs="*", help="default: all that the catalog knows")
    parser.add_argument("--deep", action="store_true", help="read every page and row, load the weights")
    parser.add_argument("--alone", action="store_true", help="not what they were made from")


def run(store: Store, arguments: argparse.Namespace) -> Output:
    """Status 1 where anything is wrong."""
    from storage.verify import verify

    versions = [aliases.resolve(store, version) for version in arguments.versions] or _all(store)
    report = verify(store, versions, deep=arguments.deep, ancestors=not arguments.alone, progress=say)
    parts = []
    if report.findings:
        rows = [(finding.version, finding.object, finding.problem) for finding in report.findings]
        parts.append(table(["version", "object", "problem"], rows))
    collected = f" ({report.collected} of them collected by gc)" if report.collected else ""
    looked = f"{report.versions} versions{collected}, {report.objects} objects, {size(report.bytes)}"
    verdict = f"{len(report.findings)} problems" if report.findings else "whole"
    return Output(asdict(report), [*parts, f"{verdict}: {looked}"], int(bool(report.findings)))


def _all(store: Store) -> list[str]:
    entered = dict.fromkeys(entry.version for entry in catalog.everything(store) if entry.kind != "alias")
    return [version for version in entered if manifests.committed(store, version)]
