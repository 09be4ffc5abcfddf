"""`verify`: checks that all objects exist and are what their manifests say."""

import argparse
from dataclasses import asdict

from storage.commands.output import Output, print_progress, size, table
from storage.maintenance.check_logs import LogReport, check_logs
from storage.maintenance.verify import verify
from storage.objects.store import Store
from storage.versions import aliases


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("versions", metavar="VERSION", nargs="*", help="default: all versions and all logs")
    parser.add_argument("--deep", action="store_true", help="read every page and row of the data, and load the weights")
    parser.add_argument("--alone", action="store_true", help="do not check what the versions were made from")


def run(store: Store, arguments: argparse.Namespace) -> Output:
    """Check versions, and all logs if no version is given; the status is 1 if there is a problem."""
    versions = [aliases.resolve_version(store, version) for version in arguments.versions]
    logs = LogReport(versions) if versions else check_logs(store)
    report = verify(store, logs.versions, deep=arguments.deep, ancestors=not arguments.alone, progress=print_progress)
    report.findings[:0] = logs.findings
    parts = []
    if report.findings:
        rows = [(finding.version, finding.object, finding.problem) for finding in report.findings]
        parts.append(table(["version", "object", "problem"], rows))
    collected = f" ({report.collected} of them collected by gc)" if report.collected else ""
    checked = f"{report.versions} versions{collected}, {report.objects} objects, {size(report.bytes)}"
    result = f"{len(report.findings)} problems" if report.findings else "whole"
    return Output(asdict(report), [*parts, f"{result}: {checked}"], int(bool(report.findings)))
