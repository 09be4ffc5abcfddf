"""Garbage collection: deletes the data of checkpoints that are not needed, and the leftovers of killed attempts.

Manifests stay, and the lists of chosen rows, so lineage, metrics and provenance stay readable. A tombstone
distinguishes collected data from lost data. Data sets stay, too: checkpoints are made again from them, and audits read
them. (Earlier programs could collect them, so readers expect tombstones of any version.) gc keeps

- checkpoints that an alias points at, and all their ancestors; for the alias `<run>/latest`, which the pipeline moves
  itself, only the checkpoint;
- checkpoints with which other runs began, and what the configurations of runs name, such as teachers and judges, also
  if nothing was made of it yet;
- of each run the last `keep_last` checkpoints, every `keep_every`-th and number 0, and more back to the newest one that
  has a train state (`train.state_every`);
- shards with which a killed rollout can be continued;
- everything of a run that is being written, and leftovers younger than `older_than_s`.

A run that is being written collects its own checkpoints after each update, by the rules of `storage.keep`.
"""

import errno
import itertools
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from storage import layout
from storage.errors import LeaseHeldError, counted
from storage.logs import catalog, leases
from storage.maintenance.verify import PrintLine
from storage.objects.local import ObjectInfo
from storage.objects.store import Store, in_parallel
from storage.version_names import PolicyVersion, select
from storage.versions import aliases, drafts, lineage, manifests
from storage.versions.manifests import Manifest

_TEMPORARY = re.compile(r"(.*/)?\.[^/]+\.[0-9a-f]{8}\.tmp")  # see storage.objects.local
UNLEASED_S = 7 * 24 * 3600.0
"""Age in seconds that leftovers must have if no lease of a run protects them, even if the rules allow younger ones."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one garbage collection.

    Args:
        keep_last: number of newest checkpoints to keep of each run, at least 1.
        keep_every: keep also every checkpoint whose number is a multiple of this; 0: none for this reason.
        older_than_s: leftovers younger than this are kept.
        ancestors: keep also the ancestors of what aliases point at.
        evaluated: keep also the checkpoints that were evaluated, but for their train state.
        after: leave alone all leftovers, and checkpoints with this number or a lower one; 0: none.
    """

    keep_last: int = 3
    keep_every: int = 0
    older_than_s: float = 24 * 3600
    ancestors: bool = True
    evaluated: bool = False
    after: int = 0


@dataclass(slots=True)
class Garbage:
    """The data that gc deletes of one run, or (`run` None) outside of all runs."""

    run: str | None
    versions: list[Manifest] = field(default_factory=list)  # with the files to delete
    leftovers: list[ObjectInfo] = field(default_factory=list)
    held_by: str | None = None  # the writer that holds the run's lease; nothing is deleted then

    @property
    def bytes(self) -> int:
        return sum(version.bytes for version in self.versions) + sum(item.bytes for item in self.leftovers)


def collect(store: Store, rules: Rules, progress: PrintLine = lambda _: None) -> list[Garbage]:
    """Delete what the rules do not keep, and return it. Each run is leased meanwhile, so no flow run writes it."""
    done = []
    for found in find_garbage(store, rules):
        if found.run is None:
            _delete(store, found, rules, progress)
            done.append(found)
            continue
        try:
            with leases.Lease(store, found.run, label="gc") as lease:
                done += collect_run(store, found.run, rules, progress, lease.check)
        except LeaseHeldError as error:
            progress(f"left alone: {error}")
            done.append(Garbage(found.run, held_by=str(error)))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or leases.is_held(store, found.run):
                raise
            done += collect_run(store, found.run, rules, progress)  # no writer has room for a lease, either
    return done


def collect_run(
    store: Store,
    run: str,
    rules: Rules,
    progress: PrintLine = lambda _: None,
    check: Callable[[], object] = lambda: None,
) -> list[Garbage]:
    """Delete what the rules do not keep of one run, and return it.

    `check` raises if another writer has taken over the run's lease.
    """
    garbage = find_garbage(store, rules, run)
    for found in garbage:
        _delete(store, found, rules, progress, check)
    return garbage


def find_garbage(store: Store, rules: Rules, run: str | None = None) -> list[Garbage]:
    """Return what `collect` would delete: of `run`, or (None) of all runs, one by one, and of what is in no run."""
    garbage = dict[str | None, Garbage]()

    def of(key: str) -> Garbage:
        name = layout.run_of(key)
        return garbage.setdefault(name, Garbage(name))

    for manifest in deletable(store, catalog.read_all(store), rules, run):
        of(manifest.version).versions.append(manifest)
    for item in [] if rules.after else _leftovers(store, rules, f"runs/{run}" if run else ""):
        of(item.path).leftovers.append(item)
    for name in garbage.keys() - {run, None}:
        garbage[name].held_by = leases.is_held(store, str(name))
    return list(garbage.values())


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
    unneeded = in_parallel(lambda version: _unneeded(store, version, attempts[version]), attempts)
    return [*leftovers, *itertools.chain.from_iterable(unneeded)]


def _unneeded(store: Store, version: str, found: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """Return those of the found objects that neither a version's manifest nor a killed rollout's continuation needs."""
    manifest = manifests.find(store, version)
    needed = {file.path for file in manifest.files} if manifest else drafts.shards(store, version).keys()
    return [item for item in found if item.path not in needed]


def _delete(
    store: Store, garbage: Garbage, rules: Rules, progress: PrintLine, check: Callable[[], object] = lambda: None
) -> None:
    """Write tombstones, read the aliases a second time, then delete the data.

    Moving an alias checks for a tombstone after the move. So either the move or this second read sees the other.
    """
    check()
    for manifest in garbage.versions:
        store.write(_tombstone(manifest), b"")  # which takes no room on a full disk
    keep = kept(store, catalog.read_all(store), rules) if garbage.versions else set()
    for manifest in [manifest for manifest in garbage.versions if manifest.version in keep]:
        garbage.versions.remove(manifest)
        store.delete(_tombstone(manifest))
    for manifest in garbage.versions:
        check()
        for file in manifest.files:
            store.delete(file.path)
        progress(f"collected {manifest.version}: {counted(len(manifest.files), 'object')}, {manifest.bytes:,} bytes")
    for item in garbage.leftovers:
        check()
        store.delete(item.path)
        progress(f"deleted {item.path}: {item.bytes:,} bytes")


def _tombstone(manifest: Manifest) -> str:
    """Return the key of the tombstone for the files to delete: all, or those of the train state."""
    return layout.tombstone(manifest.version, state=manifest.files[0].name.startswith(layout.STATE))


def kept(store: Store, entries: Sequence[catalog.CatalogEntry], rules: Rules) -> set[str]:
    """Return the versions that aliases (those they point at, and their ancestors) or other runs keep."""
    newest = aliases.newest(store)
    pointed = {move.version for move in newest.values()}
    heads = [move.version for name, move in newest.items() if not name.endswith("/latest")]
    older = {node.version for node in lineage.climb_down(store, heads)} if rules.ancestors else set[str]()
    made = ((entry.version, parent) for entry in entries if entry.kind == "checkpoint" for parent in entry.parents)
    forked = {parent for version, parent in made if layout.run_of(parent) != layout.run_of(version)}
    return pointed | older | forked | _named(store, entries, pointed)


def _named(store: Store, entries: Sequence[catalog.CatalogEntry], newest: set[str]) -> set[str]:
    """Return what configurations of runs name: those with which they began, and those of their `newest` versions."""
    begun = {entry.version for entry in entries if entry.kind == "run" or entry.version.endswith("/checkpoints/000000")}
    unread = [version for version in begun | newest if version not in store.named]
    for manifest in filter(None, in_parallel(lambda version: manifests.find(store, version), unread)):
        store.named[manifest.version] = manifest.named
    return set().union(*store.named.values())


def deletable(store: Store, entries: Sequence[catalog.CatalogEntry], rules: Rules, run: str | None) -> list[Manifest]:
    """Return the manifests of checkpoints, not yet collected, that no rule keeps, with the files to delete."""
    of_runs: dict[str, set[PolicyVersion]] = defaultdict(set)
    for version in select(PolicyVersion, (entry.version for entry in entries)):
        if version.run == (run or version.run):
            of_runs[version.run].add(version)
    candidates = {version for versions in of_runs.values() for version in _without_rule(store, versions, rules)}
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


def _without_rule(store: Store, versions: set[PolicyVersion], rules: Rules) -> list[PolicyVersion]:
    """Return the checkpoints of a run that no rule keeps: not the last, every m-th, or the first."""
    newest, has_state = list[int](), False
    for version in sorted(versions, reverse=True):
        if len(newest) >= rules.keep_last and has_state:
            break
        if manifest := manifests.find(store, version):  # a killed attempt is not counted
            newest.append(version.number)
            has_state |= bool(manifest.names_in("state"))
    first_kept = min(newest if has_state else newest[: rules.keep_last], default=0)
    between = (version for version in versions if rules.after < version.number < first_kept)  # number 0 always stays
    return [version for version in between if not rules.keep_every or version.number % rules.keep_every]
