"""The tables of an audit say of episodes what training says."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from configs.audit import Audit
from configs.score import Reward
from configs.score import Score as Scoring
from storage.records import LAST_TURN_CUT, SCORE_SCHEMA, TRAJECTORY_SCHEMA, Fault, Score, Status, Trajectory, to_table
from tasks.audit.data_sets import DataSet, Intake
from tasks.audit.database import open_database
from tasks.train.samples import build_samples
from tests.support.train_helpers import make_trajectory
from tests.support.trees import TREES

ENDINGS: list[tuple[Status, Fault, int, str]] = [
    ("completed", "", 0, ""),
    ("truncated", "", 0, ""),
    ("truncated", "", -1, LAST_TURN_CUT),
    ("truncated", "policy", -1, "no room"),
    ("truncated", "policy", 2, "no room"),
    ("failed", "policy", -1, "gave up"),
    ("failed", "policy", 3, "gave up"),
    ("failed", "set-up", -1, "an error"),
    ("rejected", "", -1, "bad group"),
]


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


@pytest.mark.parametrize(
    ("scoring", "verdicts"),
    [
        (Scoring(type="environment"), False),
        (Scoring(type="judge"), False),
        (Scoring(type="environment", tries="last"), False),
        (Scoring(), True),
    ],
    ids=["steps", "tries", "last", "verdicts"],
)
def test_episodes_earn_in_tables_what_they_earn_in_training(scoring: Scoring, verdicts: bool, tmp_path: Path) -> None:
    """`earned` of `fit.where`, the reader and the audit is that of updates; of verdicts it counts the right ones."""
    draw = np.random.default_rng(0)
    made = [random_episode(draw, f"p{n // 4:03d}/{n % 4}", f"p{n // 4:03d}") for n in range(1200)]
    rows, scores = [row for row, _ in made], [score for _, of_row in made for score in of_row]
    if verdicts:
        scores = [replace(score, reward=score.success) for score in scores]
    paths = tmp_path / "rows.parquet", tmp_path / "scores.parquet"
    pq.write_table(to_table(rows, TRAJECTORY_SCHEMA), paths[0])
    pq.write_table(to_table(scores, SCORE_SCHEMA), paths[1])
    data_set = DataSet(0, "runs/r/trajectories/000000", "r", 0, None, scorer=scoring.type, tries=scoring.tries)
    intake = Intake(trajectories=[(0, paths[0])], scores=[(0, paths[1])])
    with open_database([data_set], intake, Audit()) as database:
        found = dict(database.all("select trajectory_id, earned from episodes"))
    samples = build_samples(rows, scores, Reward(), scorers=scoring)
    assert len(samples) > 500
    if verdicts:
        graded = {sample.trajectory_id: sample.successes[sample.graded].sum() for sample in samples}
        assert {name: found[name] or 0.0 for name in graded} == graded
        return
    different = {
        sample.trajectory_id: (found[sample.trajectory_id], sample.earned)
        for sample in samples
        if (found[sample.trajectory_id] or 0.0) != pytest.approx(sample.earned, abs=1e-5)
    }
    assert not different
