"""Garbage collection: takes the data of versions that nobody needs, and what killed attempts left behind.

Manifests stay, so lineage and metrics stay readable, and what was collected is told from what was lost. Kept are

- versions that an alias points at, and everything they were made from; of the alias `<run>/latest`, which the
  pipeline moves itself, the version alone;
- of each run the last `keep_last` versions, every `keep_every`-th and number 0, and more where its settings need them;
- data sets that were not trained on yet, and shards with which a killed rollout can be continued;
- everything of a run that somebody is writing, and leftovers younger than `older_than_s`.
"""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from storage import layout
from storage.errors import LeaseHeldError
from storage.logs import catalog, holders, leases
from storage.maintenance.retention import Rules, deletable, is_gone, kept
from storage.objects.seal import seal
from storage.objects.store import ObjectInfo, Store, Upload
from storage.versions import journal, manifests
from storage.versions.manifests import File, Manifest

Tell = Callable[[str], None]
_TEMPORARY = re.compile(r"(.*/)?\.[^/]+\.[0-9a-f]{8}\.tmp")  # see storage.objects.local
_DOCTOR = "doctor/"
UNLEASED_S = 3600.0
"""What belongs to no run nobody leases: it must be older than that, whatever the rules say."""
_READERS = 16


@dataclass(slots=True)
class Plan:
    """What `rules` leave to take from one run, or (run None) from what belongs to none."""

    run: str | None
    versions: list[Manifest] = field(default_factory=list)
    leftovers: list[ObjectInfo] = field(default_factory=list)
    revived: list[str] = field(default_factory=list)  # marked by a killed gc, and an alias was moved there since
    uploads: list[Upload] = field(default_factory=list)  # S3: multipart uploads that nobody ended
    held_by: str | None = None  # who writes the run; nothing is taken then

    @property
    def bytes(self) -> int:
        return sum(version.bytes for version in self.versions) + sum(found.bytes for found in self.leftovers)


def plan(store: Store, rules: Rules) -> list[Plan]:
    """What would be taken, run by run."""
    return _plan(store, rules, run=None)


def collect(store: Store, rules: Rules, tell: Tell = lambda _: None) -> list[Plan]:
    """Take it; returns what was taken. Each run is leased meanwhile, so no flow run writes it."""
    done = []
    for found in plan(store, rules):
        if found.run is None:
            done.append(_take(store, rules, found, tell))
            continue
        try:
            with leases.Lease(store, found.run, label="gc") as lease:
                done += [_take(store, rules, again, tell, lease) for again in _plan(store, rules, found.run)]
        except LeaseHeldError as error:
            tell(f"left alone: {error}")
            done.append(Plan(found.run, held_by=str(error)))
    return done


def _plan(store: Store, rules: Rules, run: str | None) -> list[Plan]:
    """For `run`, or for all of them and what belongs to none."""
    entries = catalog.read_all(store)
    keep = kept(store, entries, rules)
    folder, plans = f"runs/{run}" if run else "", dict[str | None, Plan]()

    def of(key: str) -> Plan:
        name = layout.run_of(key)
        return plans.setdefault(name, Plan(name))

    for manifest in deletable(store, entries, keep, rules, run):
        of(manifest.version).versions.append(manifest)
    for found in _leftovers(store, rules, folder):
        of(found.path).leftovers.append(found)
    for version in _revived(store, keep, run):
        of(version).revived.append(version)
    for upload in _uploads(store, rules, folder):
        of(upload.path).uploads.append(upload)
    if run is None:
        for name, found_plan in plans.items():
            found_plan.held_by = holders.is_held(store, name) if name else None
    return list(plans.values())


def _leftovers(store: Store, rules: Rules, folder: str) -> list[ObjectInfo]:
    """Old data objects that no version needs, and old temporary files."""
    before = time.time() - rules.older_than_s
    before_elsewhere = time.time() - max(rules.older_than_s, UNLEASED_S)
    attempts: dict[str, list[ObjectInfo]] = defaultdict(list)
    found: list[ObjectInfo] = []
    for item in store.walk(folder):
        leased = layout.run_of(item.path) and not layout.is_anybodys(item.path)
        if item.modified >= (before if leased else before_elsewhere):
            continue
        if place := layout.data_of(item.path):
            attempts[place[0]].append(item)
        elif _TEMPORARY.fullmatch(item.path) or item.path.startswith(_DOCTOR):
            found.append(item)
    with ThreadPoolExecutor(_READERS) as readers:
        needed = readers.map(lambda version: _needed(store, version), attempts)
        for items, names in zip(attempts.values(), needed, strict=True):
            found += [item for item in items if item.path not in names]
    return found


def _needed(store: Store, version: str) -> set[str]:
    """Keys of the objects in a version's manifest, or of the shards with which a killed rollout can be continued."""
    if manifest := manifests.find(store, version):
        return {file.path for file in manifest.files}
    return set(journal.shards(store, version))


def _revived(store: Store, keep: set[str], run: str | None) -> list[str]:
    """Versions that a killed gc had marked, and that an alias keeps by now: their data are still there."""
    wanted = sorted(version for version in keep if (name := layout.run_of(version)) and name == (run or name))
    with ThreadPoolExecutor(_READERS) as readers:
        marked = readers.map(lambda version: store.exists(layout.tombstone(version)), wanted)
        found = [version for version, is_marked in zip(wanted, marked, strict=True) if is_marked]
    return [version for version in found if not is_gone(store, manifests.read(store, version))]


def _uploads(store: Store, rules: Rules, folder: str) -> list[Upload]:
    before = time.time() - rules.older_than_s
    return [upload for upload in store.uploads(folder) if upload.begun < before]


def _take(store: Store, rules: Rules, planned: Plan, tell: Tell, lease: leases.Lease | None = None) -> Plan:
    """Marks first, then a second look at the aliases, then the data: who moves an alias looks for the mark."""
    _check(lease)
    for manifest in planned.versions:
        mark = {"version": manifest.version, "at": time.time(), "bytes": manifest.bytes}
        store.write(layout.tombstone(manifest.version), seal(mark))
    keep = kept(store, catalog.read_all(store), rules) if planned.versions else set()
    for manifest in [manifest for manifest in planned.versions if manifest.version in keep]:
        store.delete(layout.tombstone(manifest.version))
        planned.versions.remove(manifest)
    for version in planned.revived:
        store.delete(layout.tombstone(version))
    for manifest in planned.versions:
        _check(lease)
        _delete(store, manifest.files)
        tell(f"collected {manifest.version}: {len(manifest.files)} objects, {manifest.bytes:,} bytes")
    for item in planned.leftovers:
        _check(lease)
        store.delete(item.path)
        tell(f"deleted {item.path}: {item.bytes:,} bytes")
    for upload in planned.uploads:
        _check(lease)
        store.abort_upload(upload)
        tell(f"aborted an upload of {upload.path}")
    return planned


def _check(lease: leases.Lease | None) -> None:
    """Who slept and was taken over deletes nothing of what another works on."""
    if lease:
        lease.check()


def _delete(store: Store, files: Iterable[File]) -> None:
    for file in files:
        store.delete(file.path)
