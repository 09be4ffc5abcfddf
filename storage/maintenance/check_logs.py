"""Whether the store's logs are whole: catalog, aliases, leases and nights.

Elsewhere versions are found by the catalog, and the end of a log by probing, so that an entry which was deleted can
hide those after it. Here the store is listed: what a log has lost, or never had (stores from before there was a
catalog), is found all the same.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from storage import layout
from storage.errors import DamagedError
from storage.logs import catalog
from storage.logs.entries import LOST
from storage.logs.log import Log
from storage.logs.nights import Nights
from storage.maintenance.verify import Finding
from storage.objects.store import Store
from storage.versions import aliases, manifests
from storage.versions.manifests import Manifest

Values = dict[str, Any]
_READERS = 16
_OTHERS = re.compile("|".join(log("[^/]+") for log in (layout.lease, layout.retraining)))
_NIGHTS = re.compile(layout.retraining("(?P<name>[^/]+)"))
_MEND = "`python -m storage repair`"


@dataclass(slots=True)
class LogReport:
    """What a listing of the store tells."""

    versions: list[str] = field(default_factory=list)  # those with a manifest
    findings: list[Finding] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)  # the catalog's entries that are missing or damaged
    absent: list[Values] = field(default_factory=list)  # those that it should have, oldest first
    gaps: dict[tuple[str, int], Values] = field(
        default_factory=dict
    )  # missing entries of other logs: what to put there


def check_logs(store: Store) -> LogReport:
    """Look at every log, and at which versions there are.

    Raises:
        UnavailableError: the store does not answer.
    """
    found = LogReport()
    logs = _listed(store, found)
    entries = [entry for entry in _entries(store, layout.CATALOG, logs.pop(layout.CATALOG, []), found) if entry]
    entered = {entry["version"] for entry in entries}
    listed = set(found.versions)
    found.versions += sorted(
        version
        for version in {entry["version"] for entry in entries if entry["kind"] not in ("alias", LOST)} - listed
        if manifests.committed(store, version)  # where a folder is a link, it is not listed
    )
    _find_unlisted(store, listed - entered, found)
    for log, numbers in logs.items():
        last = _entries(store, log, numbers, found)[-1]
        if name := aliases.name_of(log):
            _check_alias(store, name, last, name in entered, found)
        elif (night := _NIGHTS.fullmatch(log)) and not any(finding.version == log for finding in found.findings):
            _check_nights(store, night["name"], found)
    return found


def _listed(store: Store, found: LogReport) -> dict[str, list[int]]:
    """By log the numbers of its entries; the versions go to `found`."""
    logs = defaultdict[str, list[int]](list)
    for item in store.walk():
        if (entry := layout.entry_of(item.path)) and _is_log(entry[0]):
            logs[entry[0]].append(entry[1])
        elif version := layout.manifest_of(item.path):
            found.versions.append(version)
    return logs


def _is_log(prefix: str) -> bool:
    return prefix == layout.CATALOG or bool(aliases.name_of(prefix) or _OTHERS.fullmatch(prefix))


def _entries(store: Store, prefix: str, numbers: Iterable[int], found: LogReport) -> list[Values | None]:
    """All entries of a log, also those that came since it was listed; where one is None, it is among the findings."""
    log = Log(store, prefix)

    def read(number: int) -> Values | str:
        try:
            return log.read(number)
        except FileNotFoundError:
            return ""
        except DamagedError as error:
            return str(error)

    with ThreadPoolExecutor(_READERS) as readers:
        read_entries = list(readers.map(read, range(log.length(max(numbers, default=-1) + 1))))
    entries = [entry if isinstance(entry, dict) else None for entry in read_entries]
    for number, problem in enumerate(read_entries):
        if not isinstance(problem, dict):
            remedy = _remedy(prefix, number, problem, entries, found)
            problem = problem or "is missing, and hides later entries"
            found.findings.append(Finding(prefix, log.key(number), problem + remedy))
    return entries


def _remedy(prefix: str, number: int, problem: str, entries: list[Values | None], found: LogReport) -> str:
    """What helps against a lost entry; the material for it goes to `found`."""
    if prefix == layout.CATALOG:
        found.lost.append(number)
        return f"; {_MEND} replaces it"
    if (name := aliases.name_of(prefix)) and problem and number == len(entries) - 1:
        return f"; {aliases.remedy(name, number)}"
    if _NIGHTS.fullmatch(prefix):  # a copy would be another night; flows.retrain stops with the same finding
        return ""
    neighbours = [entry for entry in (*entries[number + 1 :], *reversed(entries[:number])) if entry]
    if not problem and neighbours:
        found.gaps[prefix, number] = neighbours[0] | ({"reason": "lost; copied from its neighbour"} if name else {})
        return f"; {_MEND} puts a copy of its neighbour there"
    return ""


def _find_unlisted(store: Store, versions: set[str], found: LogReport) -> None:
    """Versions without an entry. A damaged manifest has none to give, and `verify` tells of it."""

    def read(version: str) -> Manifest | None:
        try:
            return manifests.find(store, version)
        except DamagedError:
            return None

    with ThreadPoolExecutor(_READERS) as readers:
        missing = [manifest for manifest in readers.map(read, versions) if manifest]
    for manifest in sorted(missing, key=lambda manifest: manifest.created_at):
        parents = [parent.version for parent in manifest.parents]
        found.absent.append(catalog.values(manifest.version, manifest.kind, parents, manifest.nonce))
        problem = f"is not in the catalog, so ls, lineage and gc do not see it: {_MEND} enters it"
        found.findings.append(Finding(manifest.version, layout.CATALOG, problem))


def _check_nights(store: Store, name: str, found: LogReport) -> None:
    """Nights follow each other, and hold what a night holds."""
    try:
        Nights(store, name).read()
    except DamagedError as error:
        found.findings.append(Finding(layout.retraining(name), layout.retraining(name), str(error)))


def _check_alias(store: Store, name: str, newest: Values | None, is_entered: bool, found: LogReport) -> None:
    log = layout.alias(name)
    if not is_entered:
        found.absent.append(catalog.values(name, "alias", [], ""))
        problem = f"is not in the catalog, so `alias ls` does not show it: {_MEND} enters it"
        found.findings.append(Finding(log, layout.CATALOG, problem))
    if newest is None:  # among the findings already
        return
    key, problem = layout.manifest(newest["version"]), ""
    try:
        if hashlib.sha256(manifests.read_bytes(store, newest["version"])).hexdigest() != newest["sha256"]:
            problem = "was changed since the alias was pointed at it"
    except DamagedError as error:
        problem = f"the alias points there: {error}"
    if problem:
        found.findings.append(Finding(log, key, problem))
