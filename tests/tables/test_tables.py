"""The tables say of episodes what training says, and the words of `words.sql` what those of `words.py` say."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow.parquet as pq
import pytest

from configs.score import Reward
from configs.score import Score as Scoring
from storage import records
from storage.records import LAST_TURN_CUT, Fault, Score, Status, Trajectory, VerdictName, to_table
from tasks.score.verdict import LIMIT_MET, has_failed
from tasks.tables import words
from tasks.tables.db import TrajectoryDb, open_tables
from tasks.tables.sets import DataSet, Intake
from tasks.train.samples import build_samples
from tests.support.train_helpers import make_trajectory
from tests.support.trees import TREES

DEFAULT = Scoring()
ENDINGS: list[tuple[Status, Fault, int, str]] = [
    ("completed", "", 0, ""), ("truncated", "", 0, ""), ("truncated", "", -1, LAST_TURN_CUT),
    ("truncated", "policy", -1, "no room"), ("truncated", "policy", 2, "no room"),
    ("failed", "policy", -1, "gave up"), ("failed", "policy", 3, "gave up"),
    ("failed", "set-up", -1, "an error"), ("rejected", "", -1, "bad group"),
]  # fmt: skip


def random_episode(draw: np.random.Generator, name: str, problem: str) -> tuple[Trajectory, list[Score]]:
    """Make a chain or a tree of turns with random grades, and a random ending."""
    if draw.random() < 0.3:
        row = TREES[str(draw.choice(sorted(TREES)))].trajectory(name, problem)
    else:
        row = make_trajectory(name, [[10]] * int(draw.integers(1, 4)), problem=problem)
    status, fault, unplayed, reason = ENDINGS[draw.integers(len(ENDINGS))]
    row = replace(row, status=status, fault=fault, unplayed_turns=unplayed, reason=reason)
    silent = {turn for turn in range(len(row.turns)) if draw.random() < 0.2} | set(row.ungraded)
    row = replace(row, ungraded=sorted(silent))
    scores = list[Score]()
    for turn in range(len(row.turns)):
        right = bool(draw.random() < 0.2)
        reward = float(draw.choice([-1.0, -0.25, 0.0, 0.5])) + right
        name_of = "none" if turn in silent else "correct" if right else "wrong"
        scores.append(Score(name, turn, name_of, float(right and turn not in silent), "", "", "", reward))  # type: ignore[arg-type]
    return row, scores


@contextmanager
def tables_of(
    rows: list[Trajectory], scores: list[Score], folder: Path, scoring: Scoring = DEFAULT
) -> Iterator[TrajectoryDb]:
    """Open the tables of one data set."""
    paths = folder / "rows.parquet", folder / "scores.parquet"
    pq.write_table(to_table(rows, records.TRAJECTORY_SCHEMA), paths[0])
    pq.write_table(to_table(scores, records.SCORE_SCHEMA), paths[1])
    data_set = DataSet(0, "runs/r/trajectories/000000", "r", 0, None, scorer=scoring.type, tries=scoring.tries)
    with open_tables([data_set], Intake([(0, paths[0])], [(0, paths[1])]), 1) as database:
        yield database


SCORINGS = {
    **{"steps": Scoring(type="environment"), "last": Scoring(type="environment", tries="last")},
    **{"tries": Scoring(type="judge"), "verdicts": DEFAULT},
}


@pytest.mark.parametrize("name", SCORINGS)
def test_episodes_earn_in_tables_what_they_earn_in_training(name: str, tmp_path: Path) -> None:
    """`earned` of `fit.where`, the reader and the audit is that of updates; of verdicts it counts the right ones."""
    draw, scoring, verdicts = np.random.default_rng(0), SCORINGS[name], name == "verdicts"
    made = [random_episode(draw, f"p{n // 4:03d}/{n % 4}", f"p{n // 4:03d}") for n in range(1200)]
    rows, scores = [row for row, _ in made], [score for _, of_row in made for score in of_row]
    if verdicts:
        scores = [replace(score, reward=score.success) for score in scores]
    with tables_of(rows, scores, tmp_path, scoring) as database:
        found = dict(database.all("select trajectory_id, earned from episodes"))
    samples = build_samples(rows, scores, Reward(), scorers=scoring)
    assert len(samples) > 500
    if verdicts:
        graded = {sample.trajectory_id: sample.successes[sample.graded].sum() for sample in samples}
        assert {name: found[name] or 0.0 for name in graded} == graded
        return
    earned = {sample.trajectory_id: sample.earned for sample in samples}
    assert {name: found[name] or 0.0 for name in earned} == pytest.approx(earned, abs=1e-5)


ENDS: dict[str, Sequence[str]] = {"status": get_args(Status), "fault": get_args(Fault), "reason": ["", LAST_TURN_CUT]}
WHYS = ["", LIMIT_MET + " 5 s", "it broke"]


@pytest.mark.parametrize("allowed", range(4))
def test_the_words_mean_the_same_in_tables_and_in_memory(allowed: int, tmp_path: Path) -> None:
    """Trainable, stale, first turn, success, failed verdicts and groups without variance, on random rows."""
    draw, rows, scores = np.random.default_rng(allowed), list[Trajectory](), list[Score]()
    for number in range(1000):
        row, of_row = random_episode(draw, f"{number}", f"{number // 3}")
        ended: dict[str, Any] = {name: str(draw.choice(values)) for name, values in ENDS.items()}
        versions = [int(draw.integers(-1, 7)) if acts else -1 for acts in row.action_mask]
        mask = [acts and number % 5 > 0 for acts in row.action_mask]  # some have no action token
        ended |= {"unplayed_turns": int(draw.integers(-1, 3)), "versions": versions, "action_mask": mask}
        rows.append(replace(row, **ended))
        for score in of_row:
            verdict, why = draw.choice(get_args(VerdictName)), str(draw.choice(WHYS))
            scores.append(replace(score, verdict=verdict, reason=why, success=float(verdict == "correct")))
    with tables_of(rows, scores, tmp_path) as database:
        found = database.all(
            """select t.trajectory_id, is_trainable(t.status, t.fault, e.sampled, true),
                misses_answers(t.unplayed_turns, t.reason),
                is_stale(oldest_version(t.versions), 4, ?), coalesce(e.first, 0), coalesce(e.best, 0)
            from trajectories t join episodes e using (row) order by t.row""",
            allowed,
        )
        failed = database.all("select has_failed(verdict, reason) from scores order by row")
        same = dict(database.all("select problem_id, same from played_groups"))
    graded, expected = words.graded([asdict(score) for score in scores]), list[tuple[object, ...]]()
    for row in rows:
        successes = [turn["success"] for turn in graded.get(row.trajectory_id, [])]
        oldest = min((version for version in row.versions if version >= 0), default=4)
        found_of = words.is_trainable(row), words.misses_answers(row), words.is_stale(oldest, 4, allowed)
        expected.append((row.trajectory_id, *found_of, words.first_turn(successes), words.any_turn(successes)))
    assert found == expected
    assert failed == [(has_failed(score.verdict, score.reason),) for score in scores]
    played = {row.trajectory_id: row.problem_id for row in rows if row.status in words.PLAYED}
    earned = [
        ((played[name], score.turn), (score.reward, score.verdict == "none"))
        for score in scores
        if (name := score.trajectory_id) in played
    ]
    alike = words.without_variance(earned)
    assert same == {
        problem: all(equal for (of, _), equal in alike.items() if of == problem)
        for problem in played.values()
        if list(played.values()).count(problem) > 1
    }
