"""The scores of a stored trajectory data set: the verifier compares every turn with the problem's solutions."""

import hashlib
import importlib.metadata
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.schema import Score as ScoreSettings
from storage.objects.store import Store
from storage.records import SCORE_SCHEMA, Score
from storage.versions.datasets import ShardWriter, read_parquet
from storage.versions.drafts import Draft
from storage.versions.fetch import fetch_file
from storage.versions.manifests import File
from tasks.score.verifier import Verdict, Verifier

NEEDED = ["trajectory_id", "turns", "solutions"]
"""Columns of a trajectory data set that scoring reads."""
_BATCH_ROWS = 512
_LIBRARIES = ("math-verify", "latex2sympy2_extended", "antlr4-python3-runtime", "sympy", "mpmath")
_RULES = 2  # raise it when a change of this project changes verdicts; 2: timeouts by processor time


def scorer_fingerprint(settings: ScoreSettings) -> str:
    """Return the verifier's name: a hash of its libraries' versions, our rules and the limits that decide verdicts."""
    identity = {
        **{name: importlib.metadata.version(name) for name in _LIBRARIES},
        "rules": _RULES,
        "timeout_s": settings.timeout_s,
        "memory_mb": settings.memory_mb,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Grades:
    """What the verifier has found in turns of trajectories."""

    verdicts: Counter[str]
    example: str  # the first timeout or error; empty if there was none

    def __add__(self, other: "Grades") -> "Grades":
        return Grades(self.verdicts + other.verdicts, self.example or other.example)


NO_GRADES = Grades(Counter(), "")


@dataclass(frozen=True, slots=True)
class ShardOrder:
    """Score one shard of trajectories, for a version of scores."""

    shard: File
    version: str
    rows_per_shard: int


@dataclass(frozen=True, slots=True)
class ScoredShard:
    """The scores of one shard of trajectories: files for the version."""

    files: list[File]
    grades: Grades


def score_shard(store: Store, cache: Path, verifier: Verifier, order: ShardOrder) -> ScoredShard:
    """Grade a shard for another process, which commits the files; they lie in a folder of their own."""
    rows = read_parquet(fetch_file(store, order.shard, cache), NEEDED)
    with Draft(store, order.version, "scores") as draft:
        # The names differ from those of other processes, whose files will be in the same manifest.
        grades = score_rows(rows, verifier, draft, order.rows_per_shard, prefix=f"part-{draft.nonce}")
        return ScoredShard(draft.files, grades)


def score_rows(
    rows: Iterable[dict[str, Any]], verifier: Verifier, draft: Draft, rows_per_shard: int, prefix: str = "part"
) -> Grades:
    """Grade all turns of trajectory `rows` and write the scores into shards of `draft`.

    One batch of rows is in memory at a time.
    """
    verdicts: Counter[str] = Counter()
    example = ""
    with ShardWriter(draft, SCORE_SCHEMA, rows_per_shard, prefix) as writer:
        for score in _scores(rows, verifier):
            verdicts[score.verdict] += 1
            if score.reason and not example:
                example = f"{score.trajectory_id} turn {score.turn}: {score.verdict}, {score.reason}"
            writer.write(score)
    return Grades(verdicts, example)


def metrics_of(grades: Grades, settings: ScoreSettings, seconds: float) -> dict[str, Any]:
    """Return the metrics of scores that took `seconds`.

    Raises:
        ValueError: the share of timeouts and errors exceeds `score.max_failure_share`.
    """
    verdicts = grades.verdicts
    total, failures = verdicts.total(), verdicts["timeout"] + verdicts["error"]
    if total and failures / total > settings.max_failure_share:
        raise ValueError(
            f"{failures} of {total} answers ended in a timeout or an error, more than "
            f"score.max_failure_share={settings.max_failure_share:g}; the first one is {grades.example}"
        )
    return {"turns": total, "verdicts": dict(verdicts), "seconds": seconds}


def _scores(rows: Iterable[dict[str, Any]], verifier: Verifier) -> Iterator[Score]:
    stream = iter(rows)
    while batch := list(itertools.islice(stream, _BATCH_ROWS)):
        turns = [(row, index, turn) for row in batch for index, turn in enumerate(row["turns"])]
        verdicts = verifier.grade([(turn["text"], row["solutions"]) for row, _, turn in turns])
        for (row, index, _), verdict in zip(turns, verdicts, strict=True):
            yield _score(row["trajectory_id"], index, verdict)


def _score(trajectory_id: str, turn: int, verdict: Verdict) -> Score:
    return Score(
        trajectory_id=trajectory_id,
        turn=turn,
        verdict=verdict.name,
        success=verdict.success,
        extracted=verdict.extracted,
        solution=verdict.solution,
        reason=verdict.reason,
        reward=verdict.success,
    )
