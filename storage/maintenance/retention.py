"""Decides which versions gc keeps: those of aliases, the last of a run, every m-th, and data not trained on yet."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from storage import layout
from storage.logs import catalog
from storage.objects.store import Store
from storage.version_names import ScoresVersion, TrajectoriesVersion, version_of
from storage.versions import aliases, manifests
from storage.versions.lineage import ancestors
from storage.versions.manifests import Manifest

KINDS = ("checkpoint", "trajectories", "scores", "evaluation")
_READERS = 16


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
    with ThreadPoolExecutor(_READERS) as readers:
        uncollected = readers.map(lambda version: _uncollected(store, version), sorted(set(candidates) - keep))
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
