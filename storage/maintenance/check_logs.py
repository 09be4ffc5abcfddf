"""Checks and repairs the store's logs: catalog, aliases, leases and nights.

Other code finds versions in the catalog and the end of a log by probing. There a deleted entry can hide the entries
after it. This module lists the store instead. So it finds the entries that a log has lost, and those that it never had
(in stores from before the catalog existed).

`repair` replaces lost entries, as far as the store still shows what they held.
"""

import hashlib
import re
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from storage import layout
from storage.errors import DamagedError
from storage.logs import catalog
from storage.logs.entries import LOST
from storage.logs.log import Log
from storage.logs.nights import Nights
from storage.maintenance.verify import Finding
from storage.objects.seal import seal
from storage.objects.store import Store, in_parallel
from storage.versions import aliases, manifests
from storage.versions.manifests import Manifest

Values = dict[str, Any]
_LEASES_AND_NIGHTS = re.compile("|".join(log("[^/]+") for log in (layout.lease, layout.retraining)))
_NIGHTS = re.compile(layout.retraining("(?P<name>[^/]+)"))
_REPAIR = "`python -m storage repair`"


@dataclass(slots=True)
class LogReport:
    """The versions of a store and the problems of its logs, found by listing it."""

    versions: list[str] = field(default_factory=list)  # versions with a manifest
    findings: list[Finding] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)  # numbers of the catalog's missing or damaged entries
    absent: list[Values] = field(default_factory=list)  # entries that the catalog should have, oldest first
    # By prefix and number, missing entries of other logs: what `repair` puts there.
    gaps: dict[tuple[str, int], Values] = field(default_factory=dict)


def check_logs(store: Store) -> LogReport:
    """Check every log, and find all versions.

    Raises:
        UnavailableError: the store does not answer.
    """
    report, logs = LogReport(), defaultdict[str, list[int]](list)
    for item in store.walk():
        if (entry := layout.entry_of(item.path)) and _is_log(entry[0]):
            logs[entry[0]].append(entry[1])
        elif version := layout.manifest_of(item.path):
            report.versions.append(version)
    entries = [entry for entry in _entries(store, layout.CATALOG, logs.pop(layout.CATALOG, []), report) if entry]
    entered = {entry["version"] for entry in entries}
    listed = set(report.versions)
    report.versions += sorted(
        version
        for version in {entry["version"] for entry in entries if entry["kind"] not in ("alias", LOST)} - listed
        if manifests.committed(store, version)  # a folder that is a link is not listed
    )
    _find_unlisted(store, listed - entered, report)
    for log, numbers in logs.items():
        last = _entries(store, log, numbers, report)[-1]
        if name := aliases.name_of(log):
            if name not in entered:
                report.absent.append(catalog.values(name, "alias", [], ""))
                problem = f"is not in the catalog, so `alias ls` does not show it: {_REPAIR} enters it"
                report.findings.append(Finding(log, layout.CATALOG, problem))
            if last and (problem := _target_problem(store, last)):
                report.findings.append(Finding(log, layout.manifest(last["version"]), problem))
        elif (night := _NIGHTS.fullmatch(log)) and not any(finding.version == log for finding in report.findings):
            try:
                Nights(store, night["name"]).read()
            except DamagedError as error:
                report.findings.append(Finding(log, log, str(error)))
    return report


def _is_log(prefix: str) -> bool:
    return prefix == layout.CATALOG or bool(aliases.name_of(prefix) or _LEASES_AND_NIGHTS.fullmatch(prefix))


def _entries(store: Store, prefix: str, numbers: Iterable[int], report: LogReport) -> list[Values | None]:
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
            remedy = _remedy(prefix, number, problem, entries, report)
            problem = problem or "is missing, and hides later entries"
            report.findings.append(Finding(prefix, log.key(number), problem + remedy))
    return entries


def _remedy(prefix: str, number: int, problem: str, entries: list[Values | None], report: LogReport) -> str:
    """Return the remedy for a lost entry as the end of a sentence; add what `repair` needs to `report`."""
    if prefix == layout.CATALOG:
        report.lost.append(number)
        return f"; {_REPAIR} replaces it"
    if (name := aliases.name_of(prefix)) and problem and number == len(entries) - 1:
        return f"; {aliases.remedy(name, number)}"
    if _NIGHTS.fullmatch(prefix):  # a copied entry would add another night; flows.retrain stops with the same finding
        return ""
    neighbours = [entry for entry in (*entries[number + 1 :], *reversed(entries[:number])) if entry]
    if not problem and neighbours:
        report.gaps[prefix, number] = neighbours[0] | ({"reason": "lost; copied from its neighbour"} if name else {})
        return f"; {_REPAIR} puts a copy of its neighbour there"
    return ""


def _find_unlisted(store: Store, versions: set[str], report: LogReport) -> None:
    """Report versions without an entry. Skip those with a damaged manifest, which `verify` reports."""

    def read(version: str) -> Manifest | None:
        try:
            return manifests.find(store, version)
        except DamagedError:
            return None

    missing = [manifest for manifest in in_parallel(read, versions) if manifest]
    for manifest in sorted(missing, key=lambda manifest: manifest.created_at):
        parents = [parent.version for parent in manifest.parents]
        report.absent.append(catalog.values(manifest.version, manifest.kind, parents, manifest.nonce))
        problem = f"is not in the catalog, so ls, lineage and gc do not see it: {_REPAIR} enters it"
        report.findings.append(Finding(manifest.version, layout.CATALOG, problem))


def _target_problem(store: Store, move: Values) -> str:
    """Return what is wrong with the version that an alias points at, or an empty text."""
    try:
        digest = hashlib.sha256(manifests.read_bytes(store, move["version"])).hexdigest()
    except DamagedError as error:
        return f"the alias points there: {error}"
    return "" if digest == move["sha256"] else "was changed after the alias was pointed at it"


def repair(store: Store, progress: Callable[[str], None] = lambda _: None) -> tuple[list[str], list[str]]:
    """Replace every lost entry of the catalog, and entries of the other logs that are missing before later ones.

    Returns:
        The keys of the replaced entries; and the versions and aliases that were added to the catalog.
    """
    report = check_logs(store)
    log, absent = Log(store, layout.CATALOG), list(report.absent)
    gaps = {(layout.CATALOG, number): absent.pop(0) if absent else catalog.values("", LOST, [], "")
            for number in report.lost}  # fmt: skip
    filled = []
    for (prefix, number), values in (gaps | report.gaps).items():
        if _fill(store, Log(store, prefix), number, values):
            filled.append(Log(store, prefix).key(number))
        elif values in report.absent:  # another writer was faster, so it goes to the end
            absent.append(values)
    for values in absent:
        log.append(values)
    entered = [values["version"] for values in report.absent]
    for line in (*(f"filled {key}" for key in filled), *(f"entered {name}" for name in entered)):
        progress(line)
    return filled, entered


def _fill(store: Store, log: Log, number: int, values: dict[str, Any]) -> bool:
    """Put an entry where it is missing or damaged; return False if another writer was faster."""
    data = seal({**values, "nonce": uuid.uuid4().hex})
    if store.create(log.key(number), data):
        return True
    try:
        log.read(number)
    except DamagedError:
        store.write(log.key(number), data)
        return True
    return False
