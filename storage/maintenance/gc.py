"""Garbage collection: deletes the data of versions that are not needed, and the leftovers of killed attempts.

Manifests stay, so lineage and metrics stay readable. A tombstone distinguishes collected data from lost data. gc keeps

- versions that an alias points at, and all their ancestors; for the alias `<run>/latest`, which the pipeline moves
  itself, only the version;
- of each run the last `keep_last` versions, every `keep_every`-th and number 0, and more if its settings need them;
- data sets that were not trained on yet, and shards with which a killed rollout can be continued;
- everything of a run that is being written, and leftovers younger than `older_than_s`.
"""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from storage import layout
from storage.errors import LeaseHeldError
from storage.logs import catalog, leases
from storage.objects.seal import seal
from storage.objects.store import ObjectInfo, Store, Upload, in_parallel
from storage.version_names import ScoresVersion, TrajectoriesVersion, version_of
from storage.versions import aliases, drafts, manifests
from storage.versions.lineage import ancestors
from storage.versions.manifests import File, Manifest

KINDS = ("checkpoint", "trajectories", "scores", "evaluation")
Progress = Callable[[str], None]
_TEMPORARY = re.compile(r"(.*/)?\.[^/]+\.[0-9a-f]{8}\.tmp")  # see storage.objects.local
_DOCTOR = "doctor/"
UNLEASED_S = 3600.0
"""Age in seconds that leftovers must have if no lease protects them, even if the rules allow younger ones."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one garbage collection.

    Args:
        keep_last: number of newest versions to keep of each kind of a run, at least 1.
        keep_every: keep also every version whose number is a multiple of this; 0: no version for this reason.
        kinds: kinds of versions that are collected at all.
        older_than_s: leftovers and uploads younger than this are kept.
        with_ancestors: whether an alias keeps the ancestors of its version, too.
    """

    keep_last: int = 3
    keep_every: int = 0
    kinds: tuple[str, ...] = ("checkpoint",)
    older_than_s: float = 24 * 3600
    with_ancestors: bool = True


@dataclass(slots=True)
class Plan:
    """The data that gc deletes of one run, or (`run` None) outside of all runs."""

    run: str | None
    versions: list[Manifest] = field(default_factory=list)
    leftovers: list[ObjectInfo] = field(default_factory=list)
    revived: list[str] = field(default_factory=list)  # marked by a killed gc, but an alias was moved there since
    uploads: list[Upload] = field(default_factory=list)  # S3: unfinished multipart uploads
    held_by: str | None = None  # the writer that holds the run's lease; nothing is deleted then

    @property
    def bytes(self) -> int:
        return sum(version.bytes for version in self.versions) + sum(item.bytes for item in self.leftovers)


def plan(store: Store, rules: Rules) -> list[Plan]:
    """Return what `collect` would delete, run by run."""
    return _plan(store, rules, run=None)


def collect(store: Store, rules: Rules, progress: Progress = lambda _: None) -> list[Plan]:
    """Delete what the rules do not keep, and return it. Each run is leased meanwhile, so no flow run writes it."""
    done = []
    for planned in plan(store, rules):
        if planned.run is None:
            done.append(_delete_planned(store, rules, planned, progress))
            continue
        try:
            with leases.Lease(store, planned.run, label="gc") as lease:
                done += [
                    _delete_planned(store, rules, leased, progress, lease)
                    for leased in _plan(store, rules, planned.run)  # again, now under the lease
                ]
        except LeaseHeldError as error:
            progress(f"left alone: {error}")
            done.append(Plan(planned.run, held_by=str(error)))
    return done


def _plan(store: Store, rules: Rules, run: str | None) -> list[Plan]:
    """Plan for `run`, or (None) for all runs and what belongs to no run."""
    entries = catalog.read_all(store)
    keep = kept(store, entries, rules)
    folder, plans = f"runs/{run}" if run else "", dict[str | None, Plan]()

    def plan_of(key: str) -> Plan:
        name = layout.run_of(key)
        return plans.setdefault(name, Plan(name))

    for manifest in deletable(store, entries, keep, rules, run):
        plan_of(manifest.version).versions.append(manifest)
    for item in _leftovers(store, rules, folder):
        plan_of(item.path).leftovers.append(item)
    for version in _revived(store, keep, run):
        plan_of(version).revived.append(version)
    for upload in _uploads(store, rules, folder):
        plan_of(upload.path).uploads.append(upload)
    if run is None:
        for name, run_plan in plans.items():
            run_plan.held_by = leases.is_held(store, name) if name else None
    return list(plans.values())


def _leftovers(store: Store, rules: Rules, folder: str) -> list[ObjectInfo]:
    """Return old data objects that no version needs, and old temporary files."""
    before = time.time() - rules.older_than_s
    before_unleased = time.time() - max(rules.older_than_s, UNLEASED_S)
    attempts: dict[str, list[ObjectInfo]] = defaultdict(list)
    leftovers: list[ObjectInfo] = []
    for item in store.walk(folder):
        leased = layout.run_of(item.path) and not layout.is_written_without_lease(item.path)
        if item.modified >= (before if leased else before_unleased):
            continue
        if place := layout.data_of(item.path):
            attempts[place[0]].append(item)
        elif _TEMPORARY.fullmatch(item.path) or item.path.startswith(_DOCTOR):
            leftovers.append(item)
    needed = in_parallel(lambda version: _needed(store, version), attempts)
    for items, keys in zip(attempts.values(), needed, strict=True):
        leftovers += [item for item in items if item.path not in keys]
    return leftovers


def _needed(store: Store, version: str) -> set[str]:
    """Return the keys in a version's manifest, or those of the shards with which a killed rollout can be continued."""
    if manifest := manifests.find(store, version):
        return {file.path for file in manifest.files}
    return set(drafts.shards(store, version))


def _revived(store: Store, keep: set[str], run: str | None) -> list[str]:
    """Return versions that are kept now and still have their data, although a killed gc wrote their tombstones."""
    wanted = sorted(version for version in keep if (name := layout.run_of(version)) and name == (run or name))
    marked = in_parallel(lambda version: store.exists(layout.tombstone(version)), wanted)
    with_mark = [version for version, is_marked in zip(wanted, marked, strict=True) if is_marked]
    return [version for version in with_mark if not is_gone(store, manifests.read(store, version))]


def _uploads(store: Store, rules: Rules, folder: str) -> list[Upload]:
    before = time.time() - rules.older_than_s
    return [upload for upload in store.uploads(folder) if upload.begun < before]


def _delete_planned(
    store: Store, rules: Rules, planned: Plan, progress: Progress, lease: leases.Lease | None = None
) -> Plan:
    """Write tombstones, read the aliases a second time, then delete the data.

    Moving an alias checks for a tombstone after the move. So either the move or this second read sees the other.
    """
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
        progress(f"collected {manifest.version}: {len(manifest.files)} objects, {manifest.bytes:,} bytes")
    for item in planned.leftovers:
        _check(lease)
        store.delete(item.path)
        progress(f"deleted {item.path}: {item.bytes:,} bytes")
    for upload in planned.uploads:
        _check(lease)
        store.abort_upload(upload)
        progress(f"aborted an upload of {upload.path}")
    return planned


def _check(lease: leases.Lease | None) -> None:
    """Stop if another writer has taken over the lease, before anything of its run is deleted."""
    if lease:
        lease.check()


def _delete(store: Store, files: Iterable[File]) -> None:
    for file in files:
        store.delete(file.path)


def kept(store: Store, entries: Iterable[catalog.CatalogEntry], rules: Rules) -> set[str]:
    """Return the versions that aliases keep: those they point at, their ancestors, and their evaluations."""
    versions, pointed, entries = set[str](), set[str](), list(entries)
    moves = aliases.listed(store)
    for name in {entry.version for entry in entries if entry.kind == "alias"}.union(moves):
        if newest := aliases.current(store, name, moves.get(name, 0)):
            alone = name.endswith("/latest") or not rules.with_ancestors
            versions |= {newest.version} if alone else {node.version for node in ancestors(store, newest.version)}
            pointed.add(newest.version)
    return versions | {entry.version for entry in entries if layout.evaluated_policy(entry.version) in pointed}


def deletable(
    store: Store, entries: Sequence[catalog.CatalogEntry], keep: set[str], rules: Rules, run: str | None
) -> list[Manifest]:
    """Return the manifests of committed, not yet collected versions that no rule keeps."""
    series: dict[tuple[str, str], set[str]] = defaultdict(set)
    for entry in entries:
        owner = layout.run_of(entry.version)
        if entry.kind in rules.kinds and owner and owner == (run or owner):
            series[owner, entry.kind].add(entry.version)
    candidates = [version for versions in series.values() for version in _without_rule(store, versions, rules)]
    candidates = [version for version in candidates if not _is_untrained(store, version)]
    uncollected = in_parallel(lambda version: _uncollected(store, version), sorted(set(candidates) - keep))
    return [manifest for manifest in uncollected if manifest]


def _is_untrained(store: Store, version: str) -> bool:
    """Return whether `version` is a data set of an iteration that was not trained on yet."""
    run = layout.run_of(version)
    assert run
    known = version_of(version)
    if type(known) is not TrajectoriesVersion and not (isinstance(known, ScoresVersion) and not known.evaluation):
        return False
    return not manifests.committed(store, layout.checkpoint(run, _number(version) + 1))


def _uncollected(store: Store, version: str) -> Manifest | None:
    manifest = manifests.find(store, version)
    return None if manifest is None or is_gone(store, manifest) else manifest


def is_gone(store: Store, manifest: Manifest) -> bool:
    """Return whether gc has deleted all data of a version: it deletes the last object last."""
    return not (manifest.files and store.exists(manifest.files[-1].path))


def _without_rule(store: Store, versions: set[str], rules: Rules) -> list[str]:
    """Return those versions of one kind of a run that are not its last ones, every m-th one or its first."""
    last: set[int] = set()
    for version in sorted(versions, reverse=True):
        if len(last) >= rules.keep_last:
            break
        if manifests.find(store, version):  # a killed attempt is not counted
            last.add(_number(version))
    return [
        version
        for version in versions
        if (number := _number(version)) not in last
        and number < min(last, default=0)
        and number != 0  # reference policies and critics begin there
        and not (rules.keep_every and number % rules.keep_every == 0)
    ]


def _number(version: str) -> int:
    return layout.number_of(version) or 0
