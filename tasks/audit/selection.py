"""Select the data sets for an audit or the reader."""

import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from storage import layout
from storage.errors import DamagedError
from storage.logs import catalog
from storage.objects.store import Store
from storage.version_names import EvaluationVersion
from storage.versions import aliases, manifests
from storage.versions.lineage import scores_of
from storage.versions.manifests import Manifest

_KINDS = ("trajectories", "evaluation")
_READERS = 16
_VERSION = re.compile(f"/({'|'.join(layout.AREAS)})/")
_PERIOD = re.compile(r"(\d+)\s*(h|d|w)")
_HOURS = {"h": 1, "d": 24, "w": 7 * 24}


class TargetError(ValueError):
    """A target does not exist or cannot be audited; the message says what exists."""


@dataclass(frozen=True, slots=True)
class DataSet:
    """A committed trajectory data set with its manifest and scores.

    Example: DataSet(number=0, version="runs/demo/trajectories/000003", run="demo", iteration=3, manifest=…,
    scores=["runs/demo/scores/000003/1f0c"])
    """

    number: int  # position among the selected data sets
    version: str
    run: str
    iteration: int  # of the run; for an evaluation the policy version
    manifest: Manifest | None  # None if it cannot be read; `problem` says why
    scores: list[str] = field(default_factory=list)  # versions, oldest first; the last one is used
    problem: str = ""  # why the manifest or the data cannot be read

    @property
    def is_evaluation(self) -> bool:
        return EvaluationVersion.is_place(self.version)


def split_uri(target: str) -> tuple[str | None, str]:
    """Split a URI or path into the root, None if it names no root, and the rest.

    >>> split_uri("s3://bucket/prefix/runs/demo/trajectories/000003")
    ('s3://bucket/prefix', 'runs/demo/trajectories/000003')
    >>> split_uri("runs/demo"), split_uri("demo")
    ((None, 'runs/demo'), (None, 'demo'))
    """
    if found := _VERSION.search(target):
        return target[: found.start()], target[found.start() + 1 :].rstrip("/")
    return None, target.rstrip("/")


def parse_since(text: str, now: datetime | None = None) -> datetime | None:
    """Parse a date, a date with time, or a duration before `now`; return None for an empty text.

    >>> parse_since("7d", datetime(2026, 11, 21, tzinfo=UTC))
    datetime.datetime(2026, 11, 14, 0, 0, tzinfo=datetime.timezone.utc)

    Raises:
        TargetError: `text` is none of these.
    """
    if not text:
        return None
    try:
        if period := _PERIOD.fullmatch(text.strip()):
            return (now or datetime.now(UTC)) - timedelta(hours=int(period[1]) * _HOURS[period[2]])
        moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise TargetError(
            f"since={text!r}: give a date such as 2026-11-14, or a duration such as 12h, 7d or 2w"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def select(store: Store, targets: Sequence[str], begin: datetime | None = None) -> list[DataSet]:
    """Return the data sets that `targets` name, each once, ordered by run and iteration.

    Args:
        store: the store of the data sets.
        targets: runs (all their iterations), versions of trajectories, evaluations or scores, and aliases of these;
            empty: all runs.
        begin: leave out data sets that were committed earlier.

    Raises:
        TargetError: a target names nothing that can be audited.
        StorageError: the catalog is damaged.
    """
    entries = catalog.read_all(store)
    attempts = dict.fromkeys(entry.version for entry in entries if entry.kind in _KINDS)
    scores = scores_of(entries)
    wanted = dict.fromkeys(
        version
        for target in targets or _runs(attempts)
        for version in _versions(store, target, attempts, everything=not targets)
    )
    with ThreadPoolExecutor(_READERS) as readers:
        read = readers.map(lambda version: _read_data_set(store, version, scores), sorted(wanted, key=_order))
        committed = [each for each in read if each]
    recent = [each for each in committed if begin is None or each.manifest is None or each.manifest.created_at >= begin]
    return [replace(each, number=number) for number, each in enumerate(recent)]


def previous(store: Store, data_set: DataSet) -> DataSet | None:
    """Return the data set of the iteration before; None for evaluations, iteration 0, or if it is not in the store."""
    if data_set.is_evaluation or data_set.iteration == 0:
        return None
    version = layout.trajectories(data_set.run, data_set.iteration - 1)
    if store.exists(layout.tombstone(version)):
        return None
    return _read_data_set(store, version, scores_of(catalog.read_all(store)))


def _order(version: str) -> tuple[str, bool, str]:
    """Return a sort key: training data of a run before its evaluations, each in the order of their numbers."""
    return layout.run_of(version) or "", EvaluationVersion.is_place(version), version


def _runs(attempts: Iterable[str]) -> list[str]:
    return sorted({run for version in attempts if (run := layout.run_of(version))})


def _versions(store: Store, target: str, attempts: Iterable[str], *, everything: bool) -> list[str]:
    """Return the data sets that `target` names; for a run its training data, or its evaluations if it has none."""
    _, name = split_uri(target)
    run = name.removeprefix("runs/")
    of_run = [version for version in attempts if layout.run_of(version) == run]
    if of_run:
        training = [version for version in of_run if not EvaluationVersion.is_place(version)]
        return training or of_run
    if everything:
        return []
    if name in attempts:
        return [name]
    return [_resolved(store, target, attempts)]


def _resolved(store: Store, target: str, attempts: Iterable[str]) -> str:
    """Return the version of trajectories that an alias or a version of scores names."""
    known = f"runs in {store.root} (--root or storage.root): {', '.join(_runs(attempts)) or 'none'}"
    try:
        version = aliases.resolve_version(store, split_uri(target)[1])
        manifest = manifests.read(store, version)
    except DamagedError as error:
        raise TargetError(f"{target!r} is neither a run nor a version of trajectories; {known} ({error})") from None
    if manifest.kind in _KINDS:
        return version
    parents = [parent.version for parent in manifest.parents if parent.version in set(attempts)]
    if manifest.kind == "scores" and parents:
        return parents[0]
    raise TargetError(f"{target!r} is a {manifest.kind} version, not trajectories; {known}")


def _read_data_set(store: Store, version: str, scores: dict[str, list[str]]) -> DataSet | None:
    """Read the manifest of a data set; return None if it was never committed."""
    run, number = layout.run_of(version) or "", layout.number_of(version) or 0
    try:
        manifest = manifests.find(store, version)
        if manifest is None:
            return None
        manifest.number("rollout.max_head_offpolicyness")  # raises if it is missing; the database needs it
    except (DamagedError, OSError) as error:
        return DataSet(0, version, run, number, None, problem=str(error))
    committed_scores = [each for each in scores.get(version, ()) if manifests.committed(store, each)]
    problem = "its data were collected by gc" if store.exists(layout.tombstone(version)) else ""
    return DataSet(0, version, run, number, manifest, committed_scores, problem)
