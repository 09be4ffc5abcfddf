"""Which versions are kept: what an alias needs, the last of a run, every m-th, and what is still to be worked on."""

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
    """What to keep.

    Args:
        keep_last: newest versions of each kind of a run, at least 1.
        keep_every: every so many-th version too; 0: none for that reason.
        kinds: what is collected at all.
        older_than_s: leftovers and uploads younger than this are let be.
        with_ancestors: whether an alias keeps what its version was made from.
    """

    keep_last: int = 3
    keep_every: int = 0
    kinds: tuple[str, ...] = ("checkpoint",)
    older_than_s: float = 24 * 3600
    with_ancestors: bool = True


def kept(store: Store, entries: Iterable[catalog.CatalogEntry], rules: Rules) -> set[str]:
    """Versions that an alias keeps: what it points at, what that was made from, and the evaluations of it."""
    versions, pointed, entries = set[str](), set[str](), list(entries)
    moves = aliases.listed(store)
    for name in {entry.version for entry in entries if entry.kind == "alias"}.union(moves):
        if standing := aliases.current(store, name, moves.get(name, 0)):
            alone = name.endswith("/latest") or not rules.with_ancestors
            versions |= {standing.version} if alone else {node.version for node in ancestors(store, standing.version)}
            pointed.add(standing.version)
    return versions | {entry.version for entry in entries if layout.evaluated_policy(entry.version) in pointed}


def deletable(
    store: Store, entries: Sequence[catalog.CatalogEntry], keep: set[str], rules: Rules, run: str | None
) -> list[Manifest]:
    """Manifests of committed, not yet collected versions that no rule keeps."""
    series: dict[tuple[str, str], set[str]] = defaultdict(set)
    for entry in entries:
        owner = layout.run_of(entry.version)
        if entry.kind in rules.kinds and owner and owner == (run or owner):
            series[owner, entry.kind].add(entry.version)
    beyond = [version for versions in series.values() for version in _beyond(store, versions, rules)]
    beyond = [version for version in beyond if not _is_awaited(store, version)]
    with ThreadPoolExecutor(_READERS) as readers:
        found = readers.map(lambda version: _uncollected(store, version), sorted(set(beyond) - keep))
        return [manifest for manifest in found if manifest]


def _is_awaited(store: Store, version: str) -> bool:
    """Whether a data set has not been trained on yet."""
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
    """Whether gc has taken all of it: the last object goes last."""
    return not (manifest.files and store.exists(manifest.files[-1].path))


def _beyond(store: Store, versions: set[str], rules: Rules) -> list[str]:
    """Those of one kind of a run that its last, its every m-th and its first do not cover."""
    last: set[int] = set()
    needed = rules.keep_last
    for version in sorted(versions, reverse=True):
        if len(last) >= needed:
            break
        if manifest := manifests.find(store, version):  # an attempt that died counts for nothing
            lag = int(manifest.number("rollout.policy_lag"))
            needed = max(needed, 1 + lag)  # so many older ones may still be asked to play
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
