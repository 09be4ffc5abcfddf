"""Select stored data sets, fetch and verify their files, and note what cannot be read.

Example: the file of a data set has another hash than its manifest says. Then its path is not in
`Intake.trajectories`, and `Intake.damaged` has a case for it, which the check `damaged_objects` of the audit reports.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from storage import layout
from storage.errors import DamagedError
from storage.logs import catalog
from storage.objects.store import Store, in_parallel
from storage.version_names import EvaluationVersion
from storage.versions import contents, manifests
from storage.versions.fetch import fetch_file
from storage.versions.lineage import climb_down, scores_of
from storage.versions.manifests import File, Manifest

_KINDS = ("trajectories", "evaluation")
_FETCHED_AT_ONCE = 4
_PERIOD = re.compile(r"(\d+)\s*([hdw])")
_HOURS = {"h": 1, "d": 24, "w": 7 * 24}

LACKED = {
    "scores": "graded turns",
    "tokens": "token ids",
    "logprobs": "logprobs",
    "versions": "policy versions",
    "seeds": "seeds",
    "ends": "statuses of episodes (completed, cut or failed)",
    "golds": "gold answers",
    "rewards": "rewards",
}
"""Names for people of what a data set may lack: scores or, if it was imported (`tasks.audit.importing`), the others."""

Unit = Literal["trajectory", "turn", "call", "group", "problem", "data set", "object"]
"""The kind of thing that a case points at, and so what its id is: a trajectory id (also for a turn or a call, whose
number is in the detail), a problem id (also for a group), a version for a data set, or the key of an object."""


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that is wrong.

    Example: Case(unit="turn", id="demo/000003/12+7/0", data_set="runs/demo/trajectories/000003", detail="turn 1: …")
    """

    unit: Unit
    id: str
    data_set: str  # version; empty if the case belongs to no single data set
    detail: str  # what is wrong, in words


class ForeignError(DamagedError):
    """A file with a newer or another schema than its version should have."""


class TargetError(ValueError):
    """A target does not exist or is no data set; the message says what exists."""


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
    scorer: str | dict[str, str] = "math-verify"  # `score.type` of the newest scores, or of the data set without any
    tries: str | None = None  # `score.tries` of the same

    @property
    def is_evaluation(self) -> bool:
        return EvaluationVersion.is_place(self.version)

    @property
    def lacks(self) -> list[str]:
        """What its rows lack, in words of `LACKED`, since another program wrote them."""
        return list(self.manifest.metrics.get("lacks", ())) if self.manifest else []


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
        remedy = "give a date such as 2026-11-14, or a duration such as 12h, 7d or 2w"
        raise TargetError(f"since={text!r}: {remedy}") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def select(store: Store, targets: Sequence[str], begin: datetime | None = None) -> list[DataSet]:
    """Return the data sets that `targets` name, each once, ordered by run and iteration.

    Args:
        store: the store of the data sets.
        targets: runs (all their iterations), and versions of trajectories or evaluations; empty: all runs.
        begin: leave out data sets that were committed earlier.

    Raises:
        TargetError: a target names no data set.
        StorageError: the catalog is damaged.
    """
    entries = catalog.read_all(store)
    attempts = [entry.version for entry in entries if entry.kind in _KINDS]
    scores = scores_of(entries)
    runs = sorted({run for version in attempts if (run := layout.run_of(version))})
    known = f"runs in {store.root} (--root or storage.root): {', '.join(runs) or 'none'}"
    wanted: set[str] = set()
    for target in targets or runs:
        name = layout.split_uri(target)[1]
        of_run = [version for version in attempts if layout.run_of(version) == name.removeprefix("runs/")]
        training = [version for version in of_run if not EvaluationVersion.is_place(version)]
        if not of_run and name not in attempts:
            raise TargetError(f"{target!r} is neither a run nor a version of trajectories; {known}")
        wanted.update(training or of_run or [name])

    def order(version: str) -> tuple[str, bool, str]:
        """Return a sort key: training data of a run before its evaluations, each in the order of their numbers."""
        return layout.run_of(version) or "", EvaluationVersion.is_place(version), version

    read = in_parallel(lambda version: _read_data_set(store, version, scores), sorted(wanted, key=order))
    committed = [each for each in read if each]
    recent = [each for each in committed if begin is None or each.manifest is None or each.manifest.created_at >= begin]
    return [replace(each, number=number) for number, each in enumerate(recent)]


def _read_data_set(store: Store, version: str, scores: dict[str, list[str]]) -> DataSet | None:
    """Read the manifest of a data set; return None if it was never committed."""
    run, number = layout.run_of(version) or "", layout.number_of(version) or 0
    try:
        if (manifest := manifests.find(store, version)) is None:
            return None
        manifest.number("rollout.max_head_offpolicyness")  # raises if it is missing; the database needs it
    except (DamagedError, OSError) as error:
        return DataSet(0, version, run, number, None, problem=str(error))
    committed_scores = [each for each in scores.get(version, ()) if manifests.committed(store, each)]
    problem = "its data were collected by gc" if store.exists(layout.tombstone(version)) else ""
    newest = None  # its scorer need not be that of the run: data may be scored again
    with suppress(DamagedError):  # the check `damaged_objects` reports it
        newest = manifests.find(store, committed_scores[-1]) if committed_scores else None
    scorer, tries = ((newest or manifest).knob(f"score.{name}") for name in ("type", "tries"))
    return DataSet(0, version, run, number, manifest, committed_scores, problem, scorer or "math-verify", tries)


@dataclass(slots=True)
class Intake:
    """The files that can be read, and the cases of what cannot be read."""

    trajectories: list[tuple[int, Path]] = field(default_factory=list)  # number of the data set, file
    scores: list[tuple[int, Path]] = field(default_factory=list)
    objects: int = 0  # number of objects that were checked
    parents: int = 0  # number of parents that were checked
    damaged: list[Case] = field(default_factory=list)
    foreign: list[Case] = field(default_factory=list)  # files with a newer or another schema
    orphaned: list[Case] = field(default_factory=list)  # versions with a missing or changed parent
    collected: list[str] = field(default_factory=list)  # data sets that gc collected
    collected_scores: list[str] = field(default_factory=list)  # data sets whose scores gc collected

    def note_damage(self, key: str, data_set: DataSet, damage: str) -> None:
        self.damaged.append(Case("object", key, data_set.version, damage))

    @property
    def incomplete(self) -> set[str]:
        """The data sets with a file or scores that cannot be read."""
        return {case.data_set for case in (*self.damaged, *self.foreign)} | set(self.collected_scores)


def fetch_data_sets(store: Store, data_sets: Sequence[DataSet], cache: Path) -> Intake:
    """Fetch all files of `data_sets` and their newest scores, and check size, hash and schema of each.

    Raises:
        UnavailableError: the store does not answer.
    """
    intake = Intake()
    for data_set in data_sets:
        if data_set.manifest is None:
            intake.objects += 1
            intake.note_damage(layout.manifest(data_set.version), data_set, data_set.problem)
        elif data_set.problem:
            intake.collected.append(data_set.version)
        else:
            _fetch(store, data_set, data_set.manifest, cache, intake)
            for scores in data_set.scores[-1:]:
                if store.exists(layout.tombstone(scores)):
                    intake.collected_scores.append(data_set.version)
                    continue
                try:
                    _fetch(store, data_set, manifests.read(store, scores), cache, intake)
                except DamagedError as error:
                    intake.note_damage(layout.manifest(scores), data_set, str(error))
    _check_parents(store, data_sets, intake)
    return intake


def _fetch(store: Store, data_set: DataSet, version: Manifest, cache: Path, intake: Intake) -> None:
    """Fetch the Parquet files of a data set, or of its scores, and note those that can be read."""
    for file, path in fetch_files(store, version, cache):
        intake.objects += 1
        if isinstance(path, Path):
            (intake.scores if version.kind == "scores" else intake.trajectories).append((data_set.number, path))
        else:
            noted = intake.foreign if isinstance(path, ForeignError) else intake.damaged
            noted.append(Case("object", file.path, data_set.version, str(path)))


def fetch_files(store: Store, version: Manifest, cache: Path) -> list[tuple[File, Path | Exception]]:
    """Fetch the Parquet files of a version; return each with its local path, or why it cannot be read."""

    def fetched(file: File) -> Path | Exception:
        try:
            path = fetch_file(store, file, cache)
        except (DamagedError, OSError) as error:
            return error
        problems = contents.parquet(path, version.kind, file.rows)
        return ForeignError("; ".join(problems)) if problems else path

    files = [file for file in version.files if file.name.endswith(".parquet")]
    return list(zip(files, in_parallel(fetched, files, _FETCHED_AT_ONCE), strict=True))


def _check_parents(store: Store, data_sets: Sequence[DataSet], intake: Intake) -> None:
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
