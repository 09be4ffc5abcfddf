"""`verify`: is everything there, and is it what the manifests say?"""

import argparse
from dataclasses import asdict

from storage.commands.output import Output, print_progress, size, table
from storage.objects.store import Store
from storage.versions import aliases


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("versions", metavar="VERSION", nargs="*", help="default: all there are, and all logs")
    parser.add_argument("--deep", action="store_true", help="read every page and row, load the weights")
    parser.add_argument("--alone", action="store_true", help="not what they were made from")


def run(store: Store, arguments: argparse.Namespace) -> Output:
    """Status 1 where anything is wrong."""
    from storage.maintenance.check_logs import LogReport, check_logs
    from storage.maintenance.verify import verify

    versions = [aliases.resolve_version(store, version) for version in arguments.versions]
    found = LogReport(versions) if versions else check_logs(store)
    report = verify(store, found.versions, deep=arguments.deep, ancestors=not arguments.alone, progress=print_progress)
    report.findings[:0] = found.findings
    parts = []
    if report.findings:
        rows = [(finding.version, finding.object, finding.problem) for finding in report.findings]
        parts.append(table(["version", "object", "problem"], rows))
    collected = f" ({report.collected} of them collected by gc)" if report.collected else ""
    looked = f"{report.versions} versions{collected}, {report.objects} objects, {size(report.bytes)}"
    verdict = f"{len(report.findings)} problems" if report.findings else "whole"
    return Output(asdict(report), [*parts, f"{verdict}: {looked}"], int(bool(report.findings)))
