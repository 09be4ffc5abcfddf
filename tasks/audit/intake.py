"""Fetch and verify the Parquet files of data sets and their scores; note as cases what cannot be read.

Example: the file of a data set has another hash than its manifest says. Then its path is not in
`Intake.trajectories`, and `Intake.damaged` has a case for it, which the check `damaged_objects` reports.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from storage import layout
from storage.errors import DamagedError
from storage.objects.store import Store
from storage.version_names import PolicyVersion, select
from storage.versions import contents, manifests
from storage.versions.fetch import fetch_file, strays
from storage.versions.lineage import climb_down
from storage.versions.manifests import File, Manifest
from tasks.audit.results import Case
from tasks.audit.selection import DataSet

_FETCHED_AT_ONCE = 4


@dataclass(slots=True)
class Intake:
    """The files that an audit can read, and the cases of what it cannot read."""

    trajectories: list[tuple[int, Path]] = field(default_factory=list)  # number of the data set, file
    scores: list[tuple[int, Path]] = field(default_factory=list)
    objects: int = 0  # number of objects that were checked
    parents: int = 0  # number of parents that were checked
    damaged: list[Case] = field(default_factory=list)
    foreign: list[Case] = field(default_factory=list)  # files with a newer or another schema
    orphaned: list[Case] = field(default_factory=list)  # versions with a missing or changed parent
    strays: list[Case] = field(default_factory=list)  # objects in a version's folder that its manifest does not name
    collected: list[str] = field(default_factory=list)  # data sets that gc collected
    collected_scores: list[str] = field(default_factory=list)  # data sets whose scores gc collected

    @property
    def incomplete(self) -> set[str]:
        """The data sets with a file or scores that cannot be read."""
        return {case.data_set for case in (*self.damaged, *self.foreign)} | set(self.collected_scores)


def fetch_data_sets(store: Store, data_sets: list[DataSet], cache: Path) -> Intake:
    """Fetch all files of `data_sets` and their scores, and check size, hash and schema of each.

    Raises:
        UnavailableError: the store does not answer.
    """
    intake = Intake()
    with ThreadPoolExecutor(_FETCHED_AT_ONCE) as fetching:
        for data_set in data_sets:
            if data_set.manifest is None:
                intake.objects += 1
                key = layout.manifest(data_set.version)
                intake.damaged.append(Case("object", key, data_set.version, data_set.problem))
            elif data_set.problem:
                intake.collected.append(data_set.version)
            else:
                _fetch_data_set(store, data_set, data_set.manifest, cache, intake, fetching)
        _find_strays(store, data_sets, intake, fetching)
    _check_parents(store, data_sets, intake)
    return intake


def _fetch_data_set(
    store: Store,
    data_set: DataSet,
    manifest: Manifest,
    cache: Path,
    intake: Intake,
    fetching: ThreadPoolExecutor,
) -> None:
    for version, paths in [(manifest, intake.trajectories), *_scores(store, data_set, intake)]:
        files = [file for file in version.files if file.name.endswith(".parquet")]
        intake.objects += len(files)
        fetched = fetching.map(lambda file, kind=version.kind: _fetch_file(store, kind, file, cache), files)
        for file, (path, damage, schema_problem) in zip(files, fetched, strict=True):
            if damage:
                intake.damaged.append(Case("object", file.path, data_set.version, damage))
            elif schema_problem:
                intake.foreign.append(Case("object", file.path, data_set.version, schema_problem))
            else:
                assert path
                paths.append((data_set.number, path))


def _scores(store: Store, data_set: DataSet, intake: Intake) -> list[tuple[Manifest, list[tuple[int, Path]]]]:
    """Return the manifest of the newest scores and the list for their files; nothing if gc collected the scores."""
    if not data_set.scores:
        return []
    if store.exists(layout.tombstone(data_set.scores[-1])):
        intake.collected_scores.append(data_set.version)
        return []
    try:
        return [(manifests.read(store, data_set.scores[-1]), intake.scores)]
    except DamagedError as error:
        key = layout.manifest(data_set.scores[-1])
        intake.damaged.append(Case("object", key, data_set.version, str(error)))
        return []


def _fetch_file(store: Store, kind: str, file: File, cache: Path) -> tuple[Path | None, str, str]:
    """Return the local file (None if it is damaged), how it is damaged, and what is wrong with its schema."""
    try:
        path = fetch_file(store, file, cache)
    except (DamagedError, OSError) as error:
        return None, str(error), ""
    return path, "", "; ".join(contents.parquet(path, kind, file.rows))


def _find_strays(store: Store, data_sets: list[DataSet], intake: Intake, threads: ThreadPoolExecutor) -> None:
    """Find strays in the folders of the data sets, of their newest scores, and of the policies that played them."""
    versions = {
        version: each.version
        for each in data_sets
        if each.manifest
        for version in (
            each.version,
            *each.scores[-1:],
            *select(PolicyVersion, each.manifest.parent_names),
        )
    }
    for data_set, keys in zip(versions.values(), threads.map(lambda each: _strays(store, each), versions), strict=True):
        intake.strays += [Case("object", key, data_set, "is named by no manifest") for key in keys]


def _strays(store: Store, version: str) -> list[str]:
    """Return the strays of `version`; none if gc collected it, or if its manifest cannot be read (noted elsewhere)."""
    try:
        manifest = manifests.find(store, version)
        return [] if manifest is None or store.exists(layout.tombstone(version)) else strays(store, manifest)
    except DamagedError:
        return []


def _check_parents(store: Store, data_sets: list[DataSet], intake: Intake) -> None:
    """Check the parents of the data sets and of their newest scores. Objects already noted as damaged are skipped."""
    versions = [(each, [each.version, *each.scores[-1:]]) for each in data_sets if each.manifest]
    nodes = {node.version: node for node in climb_down(store, [name for _, names in versions for name in names], 1)}
    intake.parents = sum(node.depth == 1 for node in nodes.values())
    damaged = {case.id for case in intake.damaged}
    for data_set, names in versions:
        for version in dict.fromkeys(each for name in names for each in (name, *nodes[name].parents)):
            key, problem = layout.manifest(version), nodes[version].problem
            if problem and key not in damaged:
                intake.orphaned.append(Case("object", key, data_set.version, problem))
