"""What a tracker is (`Sink`), what it gets (`Point`), and how points are made of what a run has committed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from storage.errors import DamagedError
from storage.grouping import grouped
from storage.objects.store import Store
from storage.processes.folder import TemporaryFolder
from storage.versions import manifests
from storage.versions.datasets import read_parquet
from storage.versions.fetch import fetch_file
from storage.visible import visible
from tasks.metrics.rows import Row, numbers_of


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run for a tracker.

    Example: TrackedRun(name="demo", uri="/home/me/var/runs/demo", key="3f0c9a…", config={"run.seed": 1, …}, …)
    """

    name: str
    uri: str  # of its folder in the store
    key: str  # 16 hexadecimal digits that follow from the URI: the id of this run in a tracker
    config: Mapping[str, Any]  # dotted knobs
    folder: Path  # for files of the tracker; it exists


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts in bins: `counts[i]` values lie from `edges[i]` to `edges[i + 1]`."""

    edges: Sequence[float]
    counts: Sequence[int]


class Transcript(NamedTuple):
    """A sampled trajectory, as texts."""

    trajectory_id: str
    problem: str
    text: str  # the turns and what the environment answered
    verdicts: str  # of each turn, such as "wrong, correct"
    reward: float  # sum over its turns


@dataclass(frozen=True, slots=True)
class Point:
    """What a run committed in an iteration, or the evaluations of a policy version.

    Policy version n is evaluated before iteration n. So points are indexed 2 n for evaluations and 2 n + 1 for
    iterations; indices that a run does not have are left out.
    """

    index: int
    step: int  # iteration, or policy version
    at: float  # time of the last commit, in seconds since 1970
    numbers: Mapping[str, float]  # see `tasks.metrics.rows`; evaluations have their intervals as `…_low` and `…_high`
    versions: Mapping[str, str] = field(default_factory=dict)  # by stage, as URIs
    histograms: Mapping[str, Histogram] = field(default_factory=dict)  # ratio, advantage, length, staleness
    transcripts: Sequence[Transcript] = ()


class Sink(Protocol):
    """A tracker. Its constructor takes a `TrackedRun`; what it needs besides comes from its own environment variables.

    Each process that feeds it makes a new one, also after one that was killed, and gives it all points from the first
    one on: it drops or replaces the points that it has.
    """

    def log(self, point: Point) -> None:
        """Log a point, and return when it is stored or on its way. Any exception: it is given again later."""

    def close(self) -> None:
        """Wait until everything is stored."""


TRANSCRIPTS = 4
"""Sampled trajectories with a point that has some."""
TRANSCRIPTS_EVERY = 10
"""Iterations from one such point to the next: the texts are read from the data set itself."""
_LONGEST = 4000


def points(store: Store, rows: Sequence[Row], first: int, *, last: bool) -> Iterator[Point]:
    """Yield the points of a run from index `first` on, in order; an iteration without a checkpoint is not whole yet."""
    found = grouped((2 * row["iteration"] + (row["stage"] != "evaluate"), row) for row in rows)
    for index in sorted(found):
        stages = {row["stage"] for row in found[index]}
        growing = stages == {"evaluate"} and index == max(found) and not last
        if index >= first and stages & {"evaluate", "train"} and not growing:
            yield _point(store, index, found[index])


def _point(store: Store, index: int, rows: Sequence[Row]) -> Point:
    by_stage, numbers = {row["stage"]: row for row in rows}, dict[str, float]()
    for row in rows:
        numbers |= numbers_of(row)
    update, step = by_stage.get("train"), rows[0]["iteration"]
    # Older programs stored no histograms.
    histograms = manifests.read(store, update["version"]).metrics.get("histograms", {}) if update else {}
    shows = "rollout" in by_stage and step % TRANSCRIPTS_EVERY == 0
    return Point(
        index=index,
        step=step,
        at=datetime.fromisoformat(rows[-1]["at"]).timestamp(),
        numbers=numbers,
        versions={stage: store.uri(row["version"]) for stage, row in by_stage.items()},
        histograms={name: Histogram(each["edges"], each["counts"]) for name, each in histograms.items()},
        transcripts=read_transcripts(store, by_stage["rollout"]["version"]) if shows else (),
    )


def read_transcripts(store: Store, version: str) -> list[Transcript]:
    """Read the first trajectory of some problems in the first shard of a data set; none if gc has deleted it."""
    files = [file for file in manifests.read(store, version).files if file.name.endswith(".parquet")]
    columns = ["trajectory_id", "sample", "prompt", "turns"]
    with TemporaryFolder() as scratch:
        try:
            rows = read_parquet(fetch_file(store, files[0], scratch), columns)
            return [_transcript(row) for row in islice((row for row in rows if row["sample"] == 0), TRANSCRIPTS)]
        except (DamagedError, IndexError):  # `python -m storage verify` reports damage
            return []


def _transcript(row: dict[str, Any]) -> Transcript:
    turns = row["turns"]
    spoken = [part for turn in turns for part in (("policy", turn["text"]), ("environment", turn["feedback"]))]
    return Transcript(
        trajectory_id=row["trajectory_id"],
        problem=visible(row["prompt"], _LONGEST),
        text=visible("\n".join(f"{who}: {text}" for who, text in spoken if text), _LONGEST),
        verdicts=", ".join(turn["verdict"] for turn in turns),
        reward=sum(turn["reward"] for turn in turns),
    )
