"""The scores of a stored trajectory data set: every turn gets the verdict of its scorer, or `none`."""

import hashlib
import importlib.metadata
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.models import Role
from configs.score import Score as ScoreSettings
from storage.objects.store import Store
from storage.records import ANNOTATION_SCHEMA, SCORE_SCHEMA, Annotation, Score
from storage.telemetry.metrics import VERDICTS
from storage.version_names import AnnotationsVersion
from storage.versions import datasets
from storage.versions.datasets import ShardWriter, read_parquet
from storage.versions.drafts import Draft
from storage.versions.fetch import fetch_file
from storage.versions.manifests import File
from tasks.score.scorers import NO_MODELS, Scorers, identity
from tasks.score.verdict import FAILED, Answer, Verdict, has_failed
from tasks.score.verifier import MEMORY_MB, Verifier

ByRole = Mapping[Role, AnnotationsVersion]
"""The answers of models beside the policy about a data set."""
NO_ANNOTATIONS: ByRole = {}
_BATCH_ROWS = 512
_ABSENT: dict[str, Any] = {"source": "", "metadata": "{}"}
_ABSENT |= {name: [] for name in ("calls", "ungraded", "follows", "reward_parts", "answers")}
"""The values of columns that files before schema 5 lack."""
_LIBRARIES = ("math-verify", "latex2sympy2_extended", "antlr4-python3-runtime", "sympy", "mpmath")
_RULES = 2  # raise it when a change of this project changes verdicts; 2: timeouts by processor time


def scorer_fingerprint(settings: ScoreSettings, models: Mapping[Role, str] = NO_MODELS) -> str:
    """Return the scorers' name: a hash of libraries' versions, rules, limits and scorers, which decide verdicts.

    `models` says which models they ask, and how (`tasks.inference.location.model_fingerprints`).
    """
    libraries = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    rules = {"rules": _RULES, "timeout_s": settings.timeout_s, "memory_mb": MEMORY_MB, **identity(settings, models)}
    return hashlib.sha256(json.dumps(libraries | rules, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(slots=True)
class Grades:
    """What the scorers have found in turns of trajectories, whose scores are added one trajectory after the other.

    Means are those of the reward over graded turns on which no scorer failed (`has_failed`), also of each source of
    problems (`source/game`), and of each part (`parts/format`) over the turns that have it. The mean return is the sum
    of all rewards, divided by the number of trajectories with such a turn.
    """

    verdicts: Counter[str] = field(default_factory=Counter)
    totals: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # sums, for the means
    counts: Counter[str] = field(default_factory=Counter)  # turns in each of the sums
    episodes: int = 0  # trajectories with such a turn
    example: str = ""  # the first timeout or error; empty if there was none
    _newest: str = ""  # id of the trajectory whose graded turn was added last, and the reward of this turn
    _reward: float = 0.0

    def add(self, score: Score, source: str = "", *, last: bool = False) -> None:
        """Count a score; `last`: only the last answer of an episode is paid."""
        self.verdicts[score.verdict] += 1
        numbers = {f"parts/{name}": value for name, value in score.parts.items()}
        if score.verdict != "none" and not has_failed(score.verdict, score.reason):
            numbers["reward"] = numbers[f"source/{source}"] = score.reward
            again = score.trajectory_id == self._newest
            self.episodes += not again
            numbers["return"] = score.reward - (self._reward if again and last else 0.0)
            self._newest, self._reward = score.trajectory_id, score.reward
        if score.verdict in FAILED and not self.example:
            self.example = f"{score.trajectory_id} turn {score.turn}: {score.verdict}, {score.reason}"
        for name, value in numbers.items():
            self.totals[name] += value
            self.counts[name] += 1

    def join(self, other: "Grades") -> None:
        """Add what was found in other turns."""
        self.verdicts.update(other.verdicts)
        self.counts.update(other.counts)
        for name, total in other.totals.items():
            self.totals[name] += total
        self.episodes += other.episodes
        self.example = self.example or other.example


@dataclass(frozen=True, slots=True)
class ShardOrder:
    """Score one shard of trajectories, for a version of scores."""

    shard: File
    version: str
    settings: ScoreSettings
    rows_per_shard: int
    annotations: ByRole


ScoredShard = tuple[list[File], Grades]
"""The scores of one shard of trajectories: files for the version, and what was found."""


def score_shard(store: Store, cache: Path, verifier: Verifier, order: ShardOrder) -> ScoredShard:
    """Grade a shard for another process, which commits the files; they lie in a folder of their own."""
    annotations = read_annotations(store, order.annotations, cache)
    scorers = Scorers(order.settings, verifier, annotations=annotations)
    rows = read_parquet(fetch_file(store, order.shard, cache), scorers.columns)
    with Draft(store, order.version, "scores") as draft:
        # The names differ from those of other processes, whose files will be in the same manifest.
        grades = score_rows(rows, scorers, draft, order.rows_per_shard, prefix=f"part-{draft.nonce}")
        return draft.files, grades


def read_annotations(store: Store, versions: ByRole, cache: Path) -> dict[Role, dict[tuple[str, int], Annotation]]:
    """Read what models beside the policy said about turns, for scorers."""
    columns = [name for name in ANNOTATION_SCHEMA.names if name not in ("prompt", "logprobs")]
    return {
        role: {
            (row["trajectory_id"], row["turn"]): Annotation(**row)
            for row in datasets.rows(store, version, cache, columns)
        }
        for role, version in versions.items()
    }


def score_rows(
    rows: Iterable[dict[str, Any]], scorers: Scorers, draft: Draft, rows_per_shard: int, prefix: str = "part"
) -> Grades:
    """Grade all turns of trajectory `rows` and write the scores into shards of `draft`.

    One batch of rows is in memory at a time.
    """
    grades = Grades()
    with ShardWriter(draft, SCORE_SCHEMA, rows_per_shard, prefix) as writer:
        for source, score in scored(rows, scorers):
            grades.add(score, source, last=scorers.pays_last(source))
            writer.write(score)
    return grades


def metrics_of(grades: Grades, settings: ScoreSettings, seconds: float) -> dict[str, Any]:
    """Return the metrics of scores that took `seconds`, and add the verdicts to those of this process.

    Raises:
        ValueError: the fraction of timeouts and errors exceeds `score.max_failure_share`.
    """
    verdicts = grades.verdicts
    for verdict, count in verdicts.items():
        VERDICTS.labels(verdict).inc(count)
    total, failures = verdicts.total() - verdicts["none"], sum(verdicts[name] for name in FAILED)
    if total and failures / total > settings.max_failure_share:
        knobs = "(score.max_failure_share, in evaluations also evaluation.max_failed_share)"
        most = f"more than the share {settings.max_failure_share:g} {knobs}; the first one is {grades.example}"
        raise ValueError(f"{failures} of {total} answers ended in a timeout or an error, {most}")
    means = {name: grades.totals[name] / count for name, count in sorted(grades.counts.items())}
    sources = {name.removeprefix("source/"): mean for name, mean in means.items() if name.startswith("source/")}
    return {
        "turns": verdicts.total(),
        "verdicts": dict(verdicts),
        "reward": means.get("reward"),
        "return_mean": grades.totals["return"] / grades.episodes if grades.episodes else None,
        "parts": {name.removeprefix("parts/"): value for name, value in means.items() if name.startswith("parts/")},
        "by_source": {name: {"reward/mean": mean} for name, mean in sources.items()} if len(sources) > 1 else {},
        "seconds": seconds,
    }


def batches(rows: Iterable[dict[str, Any]], *, by_group: bool, size: int = _BATCH_ROWS) -> Iterator[list[Answer]]:
    """Yield the turns of some rows at a time: of so many, or of a group, whose rows are stored side by side."""
    stream = (_ABSENT | row for row in rows)
    if by_group:
        for _, of_problem in itertools.groupby(stream, lambda row: row["problem_id"]):
            group = list(of_problem)
            yield [Answer(row, index, group) for row in group for index in range(len(row["turns"]))]
        return
    while batch := list(itertools.islice(stream, size)):
        yield [Answer(row, index) for row in batch for index in range(len(row["turns"]))]


def scored(rows: Iterable[dict[str, Any]], scorers: Scorers) -> Iterator[tuple[str, Score]]:
    """Grade all turns of trajectory `rows`; yield the score of each after the source of its problem."""
    for turns in batches(rows, by_group=scorers.by_group):
        verdicts = iter(scorers.judge([turn for turn in turns if not turn.ungraded]))
        for turn in turns:
            verdict = Verdict("none") if turn.ungraded else next(verdicts)
            texts = verdict.extracted, verdict.solution, verdict.reason
            reward = verdict.success if verdict.reward is None else verdict.reward
            where = turn.row["trajectory_id"], turn.turn
            yield turn.row["source"], Score(*where, verdict.name, verdict.success, *texts, reward, verdict.parts)
