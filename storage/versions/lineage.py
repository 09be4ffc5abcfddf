"""Lineage: the ancestors and descendants of versions.

Ancestors follow from the parents that manifests name, descendants from the parents that entries of the catalog name.
An entry is written before its manifest and its attempt may have been killed. So an entry counts only if its manifest
names the same parents.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from storage import layout
from storage.errors import DamagedError
from storage.logs import catalog
from storage.objects.store import Store, in_parallel
from storage.version_names import ScoresVersion, TrajectoriesVersion, select
from storage.versions import manifests
from storage.versions.manifests import Parent


@dataclass(frozen=True, slots=True)
class Node:
    """A version among the ancestors or descendants of another.

    Example: Node(version="runs/demo/scores/000003/1f0c", kind="scores", depth=1, parents=["runs/demo/traj…"], …)
    """

    version: str
    kind: str  # empty if the manifest cannot be read
    depth: int  # steps from the version where the search began
    created_at: datetime | None
    parents: list[str]
    bytes: int
    rows: int
    problem: str  # why it cannot be read, or how it differs from what its child was made from; empty if neither
    fence: int | None = None


@dataclass(frozen=True, slots=True)
class _Read:
    """A node with the hash and the parents of its manifest."""

    node: Node
    sha256: str  # hash of the manifest; empty if it is missing
    parents: list[Parent]


def ancestors(store: Store, version: str) -> list[Node]:
    """Return `version`, then its ancestors, nearest first, each once. Damage is reported in the nodes.

    Raises:
        UnavailableError: the store does not answer.
    """
    return climb_down(store, [version])


def climb_down(store: Store, versions: Sequence[str], steps: int | None = None) -> list[Node]:
    """Return the `ancestors` of several versions at once, `steps` steps deep; None: all of them."""
    found: dict[str, _Read] = {}
    level, depth = list(dict.fromkeys(versions)), 0
    while level and (steps is None or depth <= steps):
        read = in_parallel(partial(_read, store, depth=depth), level)
        found |= {entry.node.version: entry for entry in read}
        named = dict.fromkeys(parent.version for entry in read for parent in entry.parents)
        level, depth = [version for version in named if version not in found], depth + 1
    return _compared(found)


def descendants(store: Store, version: str) -> list[Node]:
    """Return the committed descendants of `version`, without itself, nearest first, each once.

    Raises:
        StorageError: the catalog is damaged.
    """
    children, read, reached = _children(store), dict[str, Node | None](), {version}
    nodes: list[Node] = []
    level, depth = [version], 1
    while level:
        named = dict.fromkeys(child for parent in level for child in children.get(parent, ()))
        unread = [child for child in named if child not in read]
        read |= zip(unread, in_parallel(lambda child: _committed(store, child), unread), strict=True)
        level = [child for child in named if child not in reached and _descends_from(read[child], reached)]
        nodes += [replace(node, depth=depth) for child in level if (node := read[child])]
        reached.update(level)
        depth += 1
    return nodes


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
        raise DamagedError(
            f"{store.uri(update)} names {len(trajectories)} trajectories and {len(scores)} scores of iteration "
            f"{iteration} among its parents, not one of each: the pipeline did not write it; leave out the run"
        )
    return trajectories[0], scores[0]


def scores_of(entries: Iterable[catalog.CatalogEntry]) -> dict[str, list[str]]:
    """Group the versions of scores in `entries`, committed or not, by the trajectories they grade; oldest first."""
    found: dict[str, list[str]] = {}
    for entry in entries:
        if entry.kind == "scores":
            for parent in entry.parents:
                versions = found.setdefault(parent, [])
                if entry.version not in versions:
                    versions.append(entry.version)
    return found


def _children(store: Store) -> dict[str, list[str]]:
    """Return for each version the versions that name it as a parent in the catalog, committed or not."""
    children: dict[str, list[str]] = {}
    for entry in catalog.read_all(store):
        for parent in entry.parents if entry.kind != "alias" else []:
            children.setdefault(parent, []).append(entry.version)
    return children


def _committed(store: Store, version: str) -> Node | None:
    """Read a version; None if it was never committed."""
    try:
        data = store.read(layout.manifest(version))
    except FileNotFoundError:
        return None
    return _parsed(store, version, 0, data).node


def _descends_from(node: Node | None, versions: set[str]) -> bool:
    """Return whether `node` has a parent in `versions`. If its manifest cannot be read, the catalog is believed."""
    return node is not None and (bool(node.problem) or not versions.isdisjoint(node.parents))


def _read(store: Store, version: str, depth: int) -> _Read:
    try:
        data = manifests.read_bytes(store, version)
    except (DamagedError, OSError) as error:
        return _Read(_unreadable(version, depth, error), "", [])
    return _parsed(store, version, depth, data)


def _unreadable(version: str, depth: int, error: Exception) -> Node:
    return Node(version, "", depth, None, [], 0, 0, str(error))


def _parsed(store: Store, version: str, depth: int, data: bytes) -> _Read:
    digest = hashlib.sha256(data).hexdigest()
    try:
        manifest = manifests.parse(store, version, data)
    except ValueError as error:
        return _Read(_unreadable(version, depth, error), digest, [])
    node = Node(
        version=version,
        kind=manifest.kind,
        depth=depth,
        created_at=manifest.created_at,
        parents=[parent.version for parent in manifest.parents],
        bytes=manifest.bytes,
        rows=manifest.rows,
        problem="",
        fence=manifest.fence,
    )
    return _Read(node, digest, manifest.parents)


def _compared(found: dict[str, _Read]) -> list[Node]:
    """Return the nodes, with a problem for each manifest whose hash differs from the one that a child names."""
    problems = {version: entry.node.problem for version, entry in found.items()}
    for child, entry in found.items():
        for parent in entry.parents:
            stored = found.get(parent.version)
            if stored and stored.sha256 != parent.sha256 and not problems[parent.version]:
                problems[parent.version] = (
                    f"{layout.manifest(parent.version)} is not what {child} was made from: that had sha256 "
                    f"{parent.sha256}, this has {stored.sha256}"
                )
    return [replace(entry.node, problem=problems[version]) for version, entry in found.items()]
