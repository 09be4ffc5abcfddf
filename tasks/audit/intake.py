"""From versions to verified local Parquet files; what cannot be read is told, and left out."""

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
    """What an audit can read, and what it cannot."""

    trajectories: list[tuple[int, Path]] = field(default_factory=list)  # number of the data set, file
    scores: list[tuple[int, Path]] = field(default_factory=list)
    objects: int = 0  # looked at
    parents: int = 0
    damaged: list[Case] = field(default_factory=list)
    foreign: list[Case] = field(default_factory=list)  # of a newer or another schema
    orphaned: list[Case] = field(default_factory=list)  # without their parents
    strays: list[Case] = field(default_factory=list)  # among the data of versions whose manifests do not name them
    gone: list[str] = field(default_factory=list)  # versions whose data gc took
    unjudged: list[str] = field(default_factory=list)  # data sets whose scores gc took

    @property
    def incomplete(self) -> set[str]:
        """Versions of data sets of which a file, or one of their scores, could not be taken."""
        return {case.data_set for case in (*self.damaged, *self.foreign)} | set(self.unjudged)


def take_in(store: Store, data_sets: list[DataSet], cache: Path) -> Intake:
    """Fetch all files of `data_sets` and their scores, with a look at size, hash and schema.

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
                intake.gone.append(data_set.version)
            else:
                _take(store, data_set, data_set.manifest, cache, intake, fetching)
        _look_for_strays(store, data_sets, intake, fetching)
    _look_at_parents(store, data_sets, intake)
    return intake


def _take(
    store: Store,
    data_set: DataSet,
    manifest: Manifest,
    cache: Path,
    intake: Intake,
    fetching: ThreadPoolExecutor,
) -> None:
    for found, paths in [(manifest, intake.trajectories), *_scores(store, data_set, intake)]:
        files = [file for file in found.files if file.name.endswith(".parquet")]
        intake.objects += len(files)
        looks = fetching.map(lambda file, kind=found.kind: _look(store, kind, file, cache), files)
        for file, (path, damage, strangeness) in zip(files, looks, strict=True):
            if damage:
                intake.damaged.append(Case("object", file.path, data_set.version, damage))
            elif strangeness:
                intake.foreign.append(Case("object", file.path, data_set.version, strangeness))
            else:
                assert path
                paths.append((data_set.number, path))


def _scores(store: Store, data_set: DataSet, intake: Intake) -> list[tuple[Manifest, list[tuple[int, Path]]]]:
    """The newest scores, unless gc took them."""
    if not data_set.scores:
        return []
    if store.exists(layout.tombstone(data_set.scores[-1])):
        intake.unjudged.append(data_set.version)
        return []
    try:
        return [(manifests.read(store, data_set.scores[-1]), intake.scores)]
    except DamagedError as error:
        key = layout.manifest(data_set.scores[-1])
        intake.damaged.append(Case("object", key, data_set.version, str(error)))
        return []


def _look(store: Store, kind: str, file: File, cache: Path) -> tuple[Path | None, str, str]:
    """The local file, or how it is damaged, or what is strange about its schema."""
    try:
        path = fetch_file(store, file, cache)
    except (DamagedError, OSError) as error:
        return None, str(error), ""
    return path, "", "; ".join(contents.parquet(path, kind, file.rows))


def _look_for_strays(store: Store, data_sets: list[DataSet], intake: Intake, looking: ThreadPoolExecutor) -> None:
    """Beside the data sets, their scores that count, and the policies that played them."""
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
    for data_set, keys in zip(versions.values(), looking.map(lambda each: _strays(store, each), versions), strict=True):
        intake.strays += [Case("object", key, data_set, "is named by no manifest") for key in keys]


def _strays(store: Store, version: str) -> list[str]:
    """None of a version without a manifest that can be read, which is told elsewhere, or without its data."""
    try:
        manifest = manifests.find(store, version)
        return [] if manifest is None or store.exists(layout.tombstone(version)) else strays(store, manifest)
    except DamagedError:
        return []


def _look_at_parents(store: Store, data_sets: list[DataSet], intake: Intake) -> None:
    """Of the data sets and of the scores that count; what is damaged itself has been told."""
    made = [(each, [each.version, *each.scores[-1:]]) for each in data_sets if each.manifest]
    nodes = {node.version: node for node in climb_down(store, [name for _, names in made for name in names], 1)}
    intake.parents = sum(node.depth == 1 for node in nodes.values())
    damaged = {case.id for case in intake.damaged}
    for data_set, names in made:
        for relative in dict.fromkeys(each for name in names for each in (name, *nodes[name].parents)):
            key, problem = layout.manifest(relative), nodes[relative].problem
            if problem and key not in damaged:
                intake.orphaned.append(Case("object", key, data_set.version, problem))
