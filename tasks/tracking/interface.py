"""The interface of a tracker, and what it gets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


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


@dataclass(frozen=True, slots=True)
class Transcript:
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
    one on: it drops or replaces those that it has.
    """

    def log(self, point: Point) -> None:
        """Log a point, and return when it is stored or on its way. Any exception: it is given again later."""

    def close(self) -> None:
        """Wait until everything is stored."""
