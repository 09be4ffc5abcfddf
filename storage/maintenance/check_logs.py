"""Checks and repairs the store's logs: catalog, aliases, leases and nights.

Other code finds versions in the catalog and the end of a log by probing. There a deleted entry can hide the entries
after it. This module lists the store instead. So it finds the entries that a log has lost, and those that it never had
(in stores from before the catalog existed).

`repair` replaces lost entries of the catalog. A writer of another log fills a gap by itself.
"""

import hashlib
import re
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from storage import layout
from storage.errors import DamagedError
from storage.logs import catalog
from storage.logs.log import ALIAS, LOST, Log
from storage.logs.nights import Nights
from storage.maintenance.verify import Finding
from storage.objects.seal import seal
from storage.objects.store import Store, in_parallel
from storage.versions import aliases, manifests
from storage.versions.manifests import Manifest

Values = dict[str, Any]
_LOGS = re.compile("|".join((layout.CATALOG, layout.lease("[^/]+"), layout.retraining("[^/]+"))))
"""Prefixes of all logs but those of aliases."""
_REPAIR = "`python -m storage repair`"


@dataclass(slots=True)
class LogReport:
    """The versions of a store and the problems of its logs, found by listing it."""

    versions: list[str] = field(default_factory=list)  # versions with a manifest
    findings: list[Finding] = field(default_factory=list)
    absent: list[Manifest] = field(default_factory=list)  # versions that the catalog lacks, oldest first
    lost: list[int] = field(default_factory=list)  # numbers of the catalog's missing or damaged entries


def check_logs(store: Store) -> LogReport:
    """Check every log, and find all versions.

    Raises:
        UnavailableError: the store does not answer.
    """
    report, logs = LogReport(), defaultdict[str, list[int]](list)
    for item in store.walk():
        if (entry := layout.entry_of(item.path)) and (_LOGS.fullmatch(entry[0]) or aliases.name_of(entry[0])):
            logs[entry[0]].append(entry[1])
        elif version := layout.manifest_of(item.path):
            report.versions.append(version)
    _check_versions(store, _entries(store, layout.CATALOG, logs.pop(layout.CATALOG, []), report), report)
    for log, numbers in logs.items():
        last = _entries(store, log, numbers, report)[-1]
        if aliases.name_of(log) and last and (problem := _target_problem(store, last)):
            report.findings.append(Finding(log, layout.manifest(last["version"]), problem))
        elif log.startswith(layout.retraining("")) and not any(finding.version == log for finding in report.findings):
            try:
                Nights(store, log.removeprefix(layout.retraining(""))).read()
            except DamagedError as error:
                report.findings.append(Finding(log, log, str(error)))
    return report


def _entries(store: Store, prefix: str, numbers: Sequence[int], report: LogReport) -> list[Values | None]:
    """Read all entries of a log, including those newer than the listing. Report lost ones, and return None for them."""
    log = Log(store, prefix)

    def read(number: int) -> Values | str:
        try:
            return log.read(number)
        except FileNotFoundError:
            return ""
        except DamagedError as error:
            return str(error)

    found = in_parallel(read, range(log.length(max(numbers, default=-1) + 1)))
    entries = [entry if isinstance(entry, dict) else None for entry in found]
    for number, problem in enumerate(found):
        if isinstance(problem, str):
            remedy = _remedy(prefix, number, problem, len(entries), report)
            problem = problem or "is missing, and hides later entries"
            report.findings.append(Finding(prefix, log.key(number), problem + remedy))
    return entries


def _remedy(prefix: str, number: int, problem: str, length: int, report: LogReport) -> str:
    """Return the remedy for a lost entry as the end of a sentence; add what `repair` needs to `report`."""
    if prefix == layout.CATALOG:
        report.lost.append(number)
        return f"; {_REPAIR} replaces it"
    if (name := aliases.name_of(prefix)) and (not problem or number == length - 1):
        return f"; {aliases.remedy(name, number if problem else number - 1)}"
    return ""


def _check_versions(store: Store, entries: list[Values | None], report: LogReport) -> None:
    """Compare the catalog with the listed versions. Those with a damaged manifest are left to `verify`."""
    entered = {entry["version"] for entry in entries if entry and entry["kind"] not in (ALIAS, LOST)}
    listed = set(report.versions)
    linked = [version for version in entered - listed if manifests.committed(store, version)]  # links are not listed
    report.versions += sorted(linked)

    def read(version: str) -> Manifest | None:
        try:
            return manifests.find(store, version)
        except DamagedError:
            return None

    found = [manifest for manifest in in_parallel(read, listed - entered) if manifest]
    report.absent = sorted(found, key=lambda manifest: manifest.created_at)
    problem = f"is not in the catalog, so ls, lineage and gc do not see it: {_REPAIR} enters it"
    report.findings += [Finding(manifest.version, layout.CATALOG, problem) for manifest in report.absent]


def _target_problem(store: Store, move: Values) -> str:
    """Return what is wrong with the version that an alias points at, or an empty text."""
    try:
        digest = hashlib.sha256(manifests.read_bytes(store, move["version"])).hexdigest()
    except DamagedError as error:
        return f"the alias points there: {error}"
    return "" if digest == move["sha256"] else "was changed after the alias was pointed at it"


def repair(store: Store) -> tuple[list[str], list[str]]:
    """Put placeholders where the catalog has lost entries, and append the versions that it lacks.

    Returns:
        The keys of the replaced entries, and the versions that were added.
    """
    report, log = check_logs(store), Log(store, layout.CATALOG)
    filled = [log.key(number) for number in report.lost if _fill(store, log, number)]
    for manifest in report.absent:
        catalog.enter(store, manifest.version, manifest.kind, manifest.parent_names, manifest.nonce)
    return filled, [manifest.version for manifest in report.absent]


def _fill(store: Store, log: Log, number: int) -> bool:
    """Put a placeholder where an entry is missing or damaged; return False if another writer was faster."""
    data = seal({"kind": LOST, "version": "", "parents": [], "nonce": uuid.uuid4().hex})
    if store.create(log.key(number), data):
        return True
    try:
        log.read(number)
    except DamagedError:
        store.write(log.key(number), data)
        return True
    return False
