"""Garbage collection: deletes the data of versions that are not needed, and the leftovers of killed attempts.

Manifests stay, and the lists of chosen rows, so lineage, metrics and provenance stay readable. A tombstone
distinguishes collected data from lost data. gc keeps

- versions that an alias points at, and all their ancestors; for the alias `<run>/latest`, which the pipeline moves
  itself, only the version;
- checkpoints with which other runs began, and what the configurations of runs name, such as teachers, judges and the
  data sets of a `flows.fit` with their scores, also if nothing was made of it yet;
- of each run the last `keep_last` versions, every `keep_every`-th and number 0, and more back to the newest
  checkpoint that has a train state (`train.state_every`);
- data sets that no checkpoint with a train state was trained on yet, and shards with which a killed rollout can be
  continued;
- everything of a run that is being written, and leftovers younger than `older_than_s`.

A run that is being written collects its own checkpoints after each update, by the rules of `storage.keep`.
"""

import errno
import itertools
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from storage import layout
from storage.errors import LeaseHeldError, StorageError, counted, first_few
from storage.logs import catalog, leases
from storage.maintenance.verify import Progress
from storage.objects.local import ObjectInfo
from storage.objects.store import Store, in_parallel
from storage.version_names import AnnotationsVersion, PolicyVersion, ScoresVersion, TrajectoriesVersion, version_of
from storage.versions import aliases, drafts, lineage, manifests
from storage.versions.manifests import Manifest

KINDS = ("checkpoint", "trajectories", "annotations", "scores", "evaluation")
_TEMPORARY = re.compile(r"(.*/)?\.[^/]+\.[0-9a-f]{8}\.tmp")  # see storage.objects.local
_WATCHED = 128
"""Versions whose attempts are watched at once."""
UNLEASED_S = 3600.0
"""Age in seconds that leftovers must have if no lease protects them, even if the rules allow younger ones."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one garbage collection.

    Args:
        keep_last: number of newest versions to keep of each kind of a run, at least 1.
        keep_every: keep also every version whose number is a multiple of this; 0: no version for this reason.
        kinds: kinds of versions that are collected at all.
        older_than_s: leftovers younger than this are kept.
        ancestors: keep also the ancestors of what aliases point at.
        evaluated: keep also the checkpoints that were evaluated, but for their train state.
        after: leave alone all leftovers, and versions with this number or a lower one; 0: none.
    """

    keep_last: int = 3
    keep_every: int = 0
    kinds: tuple[str, ...] = ("checkpoint",)
    older_than_s: float = 24 * 3600
    ancestors: bool = True
    evaluated: bool = False
    after: int = 0


@dataclass(slots=True)
class Plan:
    """The data that gc deletes of one run, or (`run` None) outside of all runs."""

    run: str | None
    versions: list[Manifest] = field(default_factory=list)
    leftovers: list[ObjectInfo] = field(default_factory=list)
    held_by: str | None = None  # the writer that holds the run's lease; nothing is deleted then

    @property
    def bytes(self) -> int:
        return sum(version.bytes for version in self.versions) + sum(item.bytes for item in self.leftovers)


def collect(store: Store, rules: Rules, progress: Progress = lambda _: None) -> list[Plan]:
    """Delete what the rules do not keep, and return it. Each run is leased meanwhile, so no flow run writes it."""
    done = []
    for planned in plan(store, rules):
        if planned.run is None:
            _delete(store, planned, rules, progress, lambda: None)
            done.append(planned)
            continue
        try:
            with leases.Lease(store, planned.run, label="gc") as lease:
                done += collect_leased(store, lease, rules, progress)
        except LeaseHeldError as error:
            progress(f"left alone: {error}")
            done.append(Plan(planned.run, held_by=str(error)))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or leases.is_held(store, planned.run):
                raise
            found = plan(store, rules, planned.run)  # without a lease, for which no writer has room, either
            for each in found:
                _delete(store, each, rules, progress, lambda: None)
            done += found
    return done


def collect_leased(store: Store, lease: leases.Lease, rules: Rules, progress: Progress = lambda _: None) -> list[Plan]:
    """Delete what the rules do not keep of one run, which the caller may write under `lease`, and return it."""
    plans = plan(store, rules, lease.run)
    for planned in plans:
        _delete(store, planned, rules, progress, lease.check)
    return plans


def plan(store: Store, rules: Rules, run: str | None = None) -> list[Plan]:
    """Return what `collect` would delete: of `run`, or (None) of all runs, one by one, and of what is in no run."""
    entries = catalog.read_all(store)
    folder, plans = f"runs/{run}" if run else "", dict[str | None, Plan]()

    def plan_of(key: str) -> Plan:
        name = layout.run_of(key)
        return plans.setdefault(name, Plan(name))

    for manifest in deletable(store, entries, rules, run):
        plan_of(manifest.version).versions.append(manifest)
    for item in [] if rules.after else _leftovers(store, rules, folder):
        plan_of(item.path).leftovers.append(item)
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
        if item.modified >= (before_unleased if layout.is_written_without_lease(item.path) else before):
            continue
        if data := layout.data_of(item.path):
            attempts[data[0]].append(item)
        elif _TEMPORARY.fullmatch(item.path) or item.path.startswith("doctor/"):
            leftovers.append(item)
    # Whoever was killed on another machine is watched for a minute: all at once.
    unneeded = in_parallel(lambda version: _unneeded(store, version, attempts[version]), attempts, threads=_WATCHED)
    return [*leftovers, *itertools.chain.from_iterable(unneeded)]


def _unneeded(store: Store, version: str, found: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """Return those of the found objects that neither a version's manifest nor a killed rollout's continuation needs.

    While an attempt lives that has a lease of its own, all are needed: it may have been written by several processes.
    """
    own = {layout.data_of(item.path) for item in store.walk(layout.lease(version))}
    if not all(leases.is_free(store, "/".join(attempt)) for attempt in own if attempt):
        return []
    manifest = manifests.find(store, version)  # only now: an attempt that has just ended is committed
    needed = {file.path for file in manifest.files} if manifest else drafts.shards(store, version).keys()
    return [item for item in found if item.path not in needed]


def _delete(store: Store, planned: Plan, rules: Rules, progress: Progress, check: Callable[[], object]) -> None:
    """Write tombstones, read the aliases a second time, then delete the data.

    Moving an alias checks for a tombstone after the move. So either the move or this second read sees the other.
    `check` raises if another writer has taken over the run's lease.
    """
    check()
    for manifest in planned.versions:
        store.write(_tombstone(manifest), b"")  # which takes no room on a full disk
    keep = kept(store, catalog.read_all(store), rules) if planned.versions else set()
    for manifest in list(planned.versions):
        if manifest.version in keep:
            planned.versions.remove(manifest)
            store.delete(_tombstone(manifest))
    for manifest in planned.versions:
        check()
        for file in manifest.files:
            store.delete(file.path)
        progress(f"collected {manifest.version}: {counted(len(manifest.files), 'object')}, {manifest.bytes:,} bytes")
    for item in planned.leftovers:
        check()
        store.delete(item.path)
        progress(f"deleted {item.path}: {item.bytes:,} bytes")


def _tombstone(planned: Manifest) -> str:
    """Return the key of the tombstone for the files of a planned manifest: all, or those of the train state."""
    return layout.tombstone(planned.version, state=planned.files[0].name.startswith(layout.STATE))


def kept(store: Store, entries: Sequence[catalog.CatalogEntry], rules: Rules) -> set[str]:
    """Return the versions that aliases (those they point at, their ancestors and evaluations), or other runs keep."""
    newest = {name: aliases.current(store, name, moves) for name, moves in aliases.names(store).items()}
    pointed = {move.version for move in newest.values() if move}
    heads = [move.version for name, move in newest.items() if move and not name.endswith("/latest")]
    older = {node.version for node in lineage.climb_down(store, heads)} if rules.ancestors else set[str]()
    evaluations = {entry.version for entry in entries if layout.evaluated_policy(entry.version) in pointed}
    made = ((entry.version, parent) for entry in entries if entry.kind == "checkpoint" for parent in entry.parents)
    forked = {parent for version, parent in made if layout.run_of(parent) != layout.run_of(version)}
    named = _named(store, entries, pointed)
    graded = {entry.version for entry in entries if entry.kind == "scores" and named.intersection(entry.parents)}
    return pointed | older | evaluations | forked | named | graded


def _named(store: Store, entries: Sequence[catalog.CatalogEntry], newest: set[str]) -> set[str]:
    """Return what configurations of runs name: those with which they began, and those of their `newest` versions."""
    begun = {entry.version for entry in entries if entry.kind == "run" or entry.version.endswith("/checkpoints/000000")}
    unread = [version for version in begun | newest if version not in store.named]
    for manifest in filter(None, in_parallel(lambda version: manifests.find(store, version), unread)):
        store.named[manifest.version] = manifest.named
    return set().union(*store.named.values())


def deletable(store: Store, entries: Sequence[catalog.CatalogEntry], rules: Rules, run: str | None) -> list[Manifest]:
    """Return the manifests of committed, not yet collected versions that no rule keeps, with the files to delete."""
    series: dict[tuple[str, str], set[str]] = defaultdict(set)
    for entry in entries:
        owner = layout.run_of(entry.version)
        if entry.kind in rules.kinds and owner and owner == (run or owner):
            series[owner, entry.kind].add(entry.version)
    candidates = {version for versions in series.values() for version in _without_rule(store, versions, rules)}
    evaluated = {layout.evaluated_policy(entry.version) for entry in entries} if rules.evaluated else set()

    def read(version: str) -> Manifest | None:
        manifest = manifests.find(store, version)
        stored = manifest.files if manifest else []
        files = [file for file in stored if version not in evaluated or file.name.startswith(layout.STATE)]
        files = [file for file in files if file.name != layout.SELECTION]  # replay and provenance need it
        # gc deletes the last object last. If only the state is gone, the canary is left, as the first or the last.
        ends = {file.path for file in (*files[:1], *files[-1:])}
        return manifest.model_copy(update={"files": files}) if manifest and any(map(store.exists, ends)) else None

    needless = sorted(candidates - kept(store, entries, rules)) if candidates else []
    return [manifest for manifest in in_parallel(read, needless) if manifest]


def _without_rule(store: Store, versions: set[str], rules: Rules) -> list[str]:
    """Return those of one kind of a run that no rule keeps: not the last, every m-th, the first, or the untrained."""
    newest, resumable = list[int](), False
    for version in sorted(versions, reverse=True):
        if len(newest) >= rules.keep_last and resumable:
            break
        if manifest := manifests.find(store, version):  # a killed attempt is not counted
            newest.append(layout.number_of(version) or 0)
            resumable |= manifest.kind != "checkpoint" or bool(manifest.names_in("state"))
    first_kept = min(newest if resumable else newest[: rules.keep_last], default=0)
    numbers = {version: layout.number_of(version) or 0 for version in versions}
    return [
        version
        for version, number in numbers.items()
        if rules.after < number < first_kept  # reference policies and critics begin at 0
        and not (rules.keep_every and number % rules.keep_every == 0)
        and not _is_needed(store, version)
    ]


def _is_needed(store: Store, version: str) -> bool:
    """Return whether `version` is a data set that was not trained on yet, or only by checkpoints without train state.

    Such a state is made again from the data (`train.state_every`).
    """
    known = version_of(version)
    if not isinstance(known, TrajectoriesVersion | AnnotationsVersion | ScoresVersion) or layout.evaluated_policy(
        known
    ):
        return False
    following = itertools.count(known.number + 1)
    checkpoints = (manifests.find(store, layout.checkpoint(known.run, number)) for number in following)
    made = itertools.takewhile(lambda manifest: manifest is not None, checkpoints)
    return not any(manifest.names_in("state") for manifest in made if manifest)


def withdraw(store: Store, version: str) -> list[str]:
    """Rename the manifest of a version that lacks objects, and those of scores and annotations of it; return them all.

    They do not exist then, so what made them makes them again.

    Raises:
        StorageError: it lacks nothing, or something else names the hash of its manifest.
        LeaseHeldError: its run is being written.
    """
    run = layout.run_of(version)
    with leases.Lease(store, run, label="repair") if run else nullcontext():
        lost = manifests.lost(store, manifests.left(store, manifests.read(store, version)))
        made = lineage.descendants(store, version)
        others = [node.version for node in made if node.kind not in ("scores", "annotations")]
        if not lost or others or PolicyVersion.is_place(version):
            raise StorageError(
                f"{store.uri(version)} lacks {counted(len(lost), 'object')}, {first_few(others) or 'nothing else'} was "
                "made from it: a checkpoint or what others name by its hash is not made again. Bring its objects back"
            )
        names = [*(node.version for node in reversed(made)), version]
        for name in names:  # the version itself last, so that a killed repair is finished by the next
            store.write(f"{name}/withdrawn.json", manifests.read_bytes(store, name))
            store.delete(layout.manifest(name))
    return names
