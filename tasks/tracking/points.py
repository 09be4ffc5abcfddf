"""Points for trackers, made from the metrics, manifests and trajectories of a run."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from storage.errors import DamagedError
from storage.objects.store import Store
from storage.versions import manifests
from storage.versions.fetch import fetch_file
from storage.visible import visible
from tasks.metrics.rows import Row, numbers_of
from tasks.tracking.interface import Histogram, Point, Transcript

TRANSCRIPTS = 4
"""Sampled trajectories with a point that has some."""
TRANSCRIPTS_EVERY = 10
"""Iterations from one such point to the next: the texts are read from the data set itself."""
_LONGEST = 4000
_BATCH = 64


def points(store: Store, rows: Sequence[Row], first: int, scratch: Path, *, last: bool) -> Iterator[Point]:
    """Yield the points of a run from index `first` on, in order; an iteration without a checkpoint is not whole yet."""
    found = defaultdict[int, list[Row]](list)
    for row in rows:
        found[2 * row["iteration"] + (row["stage"] != "evaluate")].append(row)
    for index in sorted(found):
        stages = {row["stage"] for row in found[index]}
        growing = stages == {"evaluate"} and index == max(found) and not last
        if index >= first and stages & {"evaluate", "train"} and not growing:
            yield _point(store, index, found[index], scratch)


def _point(store: Store, index: int, rows: Sequence[Row], scratch: Path) -> Point:
    by_stage, numbers = {row["stage"]: row for row in rows}, dict[str, float]()
    for row in rows:
        numbers |= numbers_of(row)
    histograms = dict[str, Histogram]()
    if update := by_stage.get("train"):
        stored = manifests.read(store, update["version"]).metrics.get("histograms", {})  # older programs stored none
        histograms = {name: Histogram(each["edges"], each["counts"]) for name, each in stored.items()}
    step = rows[0]["iteration"]
    rollout = by_stage.get("rollout") if step % TRANSCRIPTS_EVERY == 0 else None
    return Point(
        index=index,
        step=step,
        at=datetime.fromisoformat(rows[-1]["at"]).timestamp(),
        numbers=numbers,
        versions={stage: store.uri(row["version"]) for stage, row in by_stage.items()},
        histograms=histograms,
        transcripts=read_transcripts(store, rollout["version"], scratch) if rollout else (),
    )


def read_transcripts(store: Store, version: str, scratch: Path) -> list[Transcript]:
    """Read the first trajectory of some problems in the first shard of a data set; none if gc has deleted it."""
    files = [file for file in manifests.read(store, version).files if file.name.endswith(".parquet")]
    try:
        path = fetch_file(store, files[0], scratch)
    except (DamagedError, IndexError):  # `python -m storage verify` reports damage
        return []
    columns = ["trajectory_id", "sample", "prompt", "turns"]
    rows = (row for batch in pq.ParquetFile(path).iter_batches(_BATCH, columns=columns) for row in batch.to_pylist())
    return [_transcript(row) for row in itertools.islice((row for row in rows if row["sample"] == 0), TRANSCRIPTS)]


def _transcript(row: dict[str, Any]) -> Transcript:
    turns = row["turns"]
    said = [
        f"{who}: {text}"
        for turn in turns
        for who, text in (("policy", turn["text"]), ("environment", turn["feedback"]))
        if text
    ]
    return Transcript(
        trajectory_id=row["trajectory_id"],
        problem=visible(row["prompt"], _LONGEST),
        text=visible("\n".join(said), _LONGEST),
        verdicts=", ".join(turn["verdict"] for turn in turns),
        reward=sum(turn["reward"] for turn in turns),
    )
