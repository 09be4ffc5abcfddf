"""Where versions come from, and what came of them.

Downwards by the parents that manifests name; upwards by the parents that the catalog's entries name. An entry is made
before the manifest and may be that of an attempt that died, so it is believed only where the manifest says the same.
"""

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime

from storage import layout
from storage.errors import DamagedError
from storage.logs import catalog
from storage.objects.store import Store
from storage.version_names import ScoresVersion, TrajectoriesVersion, select
from storage.versions import manifests
from storage.versions.manifests import Parent

_READERS = 16


@dataclass(frozen=True, slots=True)
class Node:
    """A version in its family.

    Example: Node(version="runs/demo/scores/000003/1f0c", kind="scores", depth=1, parents=["runs/demo/traj…"], …)
    """

    version: str
    kind: str  # empty where the manifest cannot be read
    depth: int  # steps from where the walk began
    created_at: datetime | None
    parents: list[str]
    bytes: int
    rows: int
    problem: str  # why it cannot be read, or is not what its child was made from; empty where neither is so
    fence: int | None = None


@dataclass(frozen=True, slots=True)
class _Read:
    """A node with what its manifest is compared by."""

    node: Node
    sha256: str  # empty where there are no bytes
    parents: list[Parent]


def ancestors(store: Store, version: str) -> list[Node]:
    """`version` first, then all that it was made from, nearest first, each once. Damage is told in the nodes.

    Raises:
        UnavailableError: the store does not answer.
    """
    return climb_down(store, [version])


def climb_down(store: Store, versions: Sequence[str], steps: int | None = None) -> list[Node]:
    """`ancestors` of several versions at once, `steps` steps deep; None: all the way."""
    found: dict[str, _Read] = {}
    level, depth = list(dict.fromkeys(versions)), 0
    with ThreadPoolExecutor(_READERS) as readers:
        while level and (steps is None or depth <= steps):
            read = list(readers.map(lambda version, depth=depth: _read(store, version, depth), level))
            found |= {each.node.version: each for each in read}
            named = dict.fromkeys(parent.version for each in read for parent in each.parents)
            level, depth = [version for version in named if version not in found], depth + 1
    return _compared(found)


def descendants(store: Store, version: str) -> list[Node]:
    """What came of `version`, itself left out: nearest first, each once, only what is committed.

    Raises:
        StorageError: the catalog is damaged.
    """
    children, looked, reached = _children(store), dict[str, Node | None](), {version}
    nodes: list[Node] = []
    level, depth = [version], 1
    with ThreadPoolExecutor(_READERS) as readers:
        while level:
            named = dict.fromkeys(child for parent in level for child in children.get(parent, ()))
            unread = [child for child in named if child not in looked]
            looked |= zip(unread, readers.map(lambda child: _committed(store, child), unread), strict=True)
            level = [child for child in named if child not in reached and _came_of(looked[child], reached)]
            nodes += [replace(node, depth=depth) for child in level if (node := looked[child])]
            reached.update(level)
            depth += 1
    return nodes


def trained_on(store: Store, run: str, iteration: int) -> tuple[TrajectoriesVersion, ScoresVersion]:
    """Versions of the trajectories and scores that the iteration's update was made from, as its manifest says.

    The judge may have become another since, so the scores' name does not follow from today's.

    Raises:
        StorageError: there is no such update, or its manifest does not name one of each.
    """
    update = layout.checkpoint(run, iteration + 1)
    parents = manifests.read(store, update).parent_names
    trajectories = select(TrajectoriesVersion, {layout.trajectories(run, iteration)}.intersection(parents))
    judged = [each for each in select(ScoresVersion, parents) if not each.evaluation]
    scores = [each for each in judged if (each.run, each.number) == (run, iteration)]
    if len(trajectories) != 1 or len(scores) != 1:
        raise DamagedError(
            f"{store.uri(update)} names {len(trajectories)} trajectories and {len(scores)} scores of iteration "
            f"{iteration} among its parents, not one of each: the pipeline did not write it; leave the run out"
        )
    return trajectories[0], scores[0]


def scores_of(entries: Iterable[catalog.CatalogEntry]) -> dict[str, list[str]]:
    """Attempts at scores, by the trajectories that they judge, oldest first."""
    found: dict[str, list[str]] = {}
    for entry in entries:
        if entry.kind == "scores":
            for parent in entry.parents:
                versions = found.setdefault(parent, [])
                if entry.version not in versions:
                    versions.append(entry.version)
    return found


def _children(store: Store) -> dict[str, list[str]]:
    """By version, those that attempts wanted to make from it."""
    children: dict[str, list[str]] = {}
    for entry in catalog.read_all(store):
        for parent in entry.parents if entry.kind != "alias" else []:
            children.setdefault(parent, []).append(entry.version)
    return children


def _committed(store: Store, version: str) -> Node | None:
    """None for an attempt that died."""
    try:
        data = store.read(layout.manifest(version))
    except FileNotFoundError:
        return None
    return _parsed(store, version, 0, data).node


def _came_of(node: Node | None, versions: set[str]) -> bool:
    """One whose manifest cannot be read counts: the catalog is all that is known of it."""
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
    """The nodes; those whose manifests are not the ones that their children name say so."""
    problems = {version: each.node.problem for version, each in found.items()}
    for child, each in found.items():
        for parent in each.parents:
            there = found.get(parent.version)
            if there and there.sha256 != parent.sha256 and not problems[parent.version]:
                problems[parent.version] = (
                    f"{layout.manifest(parent.version)} is not what {child} was made from: that had sha256 "
                    f"{parent.sha256}, this has {there.sha256}"
                )
    return [replace(each.node, problem=problems[version]) for version, each in found.items()]
