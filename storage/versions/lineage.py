"""Lineage: the ancestors and descendants of versions.

Ancestors follow from the parents that manifests name, descendants from the parents that entries of the catalog name.
An entry is written before its manifest and its attempt may have been killed. So an entry counts only if its manifest
names the same parents.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from storage import errors, layout
from storage.grouping import grouped
from storage.logs import catalog
from storage.objects.store import Store, in_parallel
from storage.version_names import ScoresVersion, TrajectoriesVersion, select
from storage.versions import manifests


@dataclass(frozen=True, slots=True)
class Relative:
    """A version among the ancestors or descendants of another.

    Example: Relative(version="runs/demo/scores/000003/1f0c", kind="scores", depth=1, parents=["runs/demo/traj…"], …)
    """

    version: str
    kind: str  # empty if the manifest cannot be read
    depth: int  # steps from the version where the search began
    parents: list[str]
    bytes: int
    rows: int
    problem: str = ""  # why it cannot be read, or how it differs from what its child was made from


def climb_down(store: Store, versions: Sequence[str], steps: int | None = None) -> list[Relative]:
    """Return the versions, then their ancestors, nearest first, each once. Damage is reported in the nodes.

    Args:
        store: the store of the versions.
        versions: where the search begins.
        steps: how deep it goes; None: to the beginning.

    Raises:
        UnavailableError: the store does not answer.
    """
    nodes: dict[str, Relative] = {}
    digests: dict[str, str] = {}
    named: list[tuple[str, manifests.Parent]] = []  # with the version that names it
    level, depth = list(dict.fromkeys(versions)), 0
    while level and (steps is None or depth <= steps):
        for node, digest, parents in in_parallel(partial(_read, store, depth), level):
            nodes[node.version], digests[node.version] = node, digest
            named += [(node.version, parent) for parent in parents]
        level = list(dict.fromkeys(parent.version for _, parent in named if parent.version not in nodes))
        depth += 1
    for child, parent in named:
        known = nodes.get(parent.version)
        if known and not known.problem and digests[parent.version] != parent.sha256:
            problem = (
                f"{layout.manifest(parent.version)} is not what {child} was made from: that had sha256 "
                f"{parent.sha256}, this has {digests[parent.version]}"
            )
            nodes[parent.version] = replace(known, problem=problem)
    return list(nodes.values())


def descendants(store: Store, version: str) -> list[Relative]:
    """Return the committed descendants of `version`, without itself, nearest first, each once.

    Raises:
        StorageError: the catalog is damaged.
    """
    children = grouped((parent, entry.version) for entry in catalog.read_all(store) for parent in entry.parents)
    nodes: dict[str, Relative] = {}
    level, depth = [version], 1
    while level:
        entered = dict.fromkeys(child for parent in level for child in children.get(parent, ()) if child not in nodes)
        for node, digest, _ in in_parallel(partial(_read, store, depth), entered):
            # A manifest that is there but cannot be read names no parents: the catalog is believed.
            if digest and (node.problem or any(parent == version or parent in nodes for parent in node.parents)):
                nodes[node.version] = node
        level, depth = [child for child in entered if child in nodes], depth + 1
    return list(nodes.values())


def _read(store: Store, depth: int, version: str) -> tuple[Relative, str, list[manifests.Parent]]:
    """Read a version; return also the sha256 of its manifest, empty if there is none, and its parents."""
    digest = ""
    try:
        data = manifests.read_bytes(store, version)
        digest = hashlib.sha256(data).hexdigest()
        manifest = manifests.parse(store, version, data)
    except (errors.DamagedError, OSError) as error:
        return Relative(version, "", depth, [], 0, 0, str(error)), digest, []
    own = Relative(version, manifest.kind, depth, manifest.parent_names, manifest.bytes, manifest.rows)
    return own, digest, manifest.parents


def trained_on(store: Store, run: str, iteration: int) -> tuple[TrajectoriesVersion, ScoresVersion]:
    """Return the versions of trajectories and scores from which the update of an iteration was made, by its manifest.

    The name of the scores contains the verifier, which may have changed since. So the current configuration does not
    give that name.

    Raises:
        StorageError: there is no such update, or its manifest does not name exactly one of each.
    """
    update = layout.checkpoint(run, iteration + 1)
    parents = manifests.read(store, update).parent_names
    trajectories = select(TrajectoriesVersion, {layout.trajectories(run, iteration)}.intersection(parents))
    of_iterations = [version for version in select(ScoresVersion, parents) if not version.evaluation]
    scores = [version for version in of_iterations if (version.run, version.number) == (run, iteration)]
    if len(trajectories) != 1 or len(scores) != 1:
        raise errors.DamagedError(
            f"{store.uri(update)} names {len(trajectories)} trajectories and {len(scores)} scores of iteration "
            f"{iteration} among its parents, not one of each: the pipeline did not write it"
        )
    return trajectories[0], scores[0]


def scores_of(entries: Sequence[catalog.CatalogEntry]) -> dict[str, list[str]]:
    """Group the versions of scores in `entries`, committed or not, by the trajectories they grade.

    The oldest are first, but those that a checkpoint was trained on are last: readers use the last ones.
    """
    trained = {parent for entry in entries if entry.kind == "checkpoint" for parent in entry.parents}
    made = grouped((parent, entry.version) for entry in entries if entry.kind == "scores" for parent in entry.parents)
    return {version: sorted(dict.fromkeys(scores), key=trained.__contains__) for version, scores in made.items()}
