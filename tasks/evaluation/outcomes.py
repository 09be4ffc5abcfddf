"""Successes of stored episodes: trajectories joined with their scores by DuckDB."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from tasks.evaluation.statistics import proportion

_OUTCOMES = """
    select t.problem_id, t.sample, t.status, len(t.turns) as turns,
           list(s.success order by s.turn) filter (s.turn is not null) as success
    from read_parquet($trajectories) t left join read_parquet($scores) s using (trajectory_id)
    group by all order by t.problem_id, t.sample
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one episode. `success` has an entry for each judged turn."""

    problem_id: str
    sample: int
    status: str
    success: list[float]

    @property
    def first(self) -> float:
        """Success of the first turn."""
        return self.success[0] if self.success else 0.0

    @property
    def any(self) -> float:
        """Success of any turn."""
        return max(self.success, default=0.0)


def read_outcomes(trajectories: Sequence[Path], scores: Sequence[Path]) -> list[Outcome]:
    """Outcomes of the episodes in Parquet files, ordered by problem and sample."""
    if not trajectories:
        return []
    parameters = {"trajectories": [str(path) for path in trajectories], "scores": [str(path) for path in scores]}
    with duckdb.connect() as connection:
        rows = connection.execute(_OUTCOMES, parameters).fetchall()
    return [Outcome(problem, sample, status, success or []) for problem, sample, status, _, success in rows]


def summarise(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Accuracies with intervals: first turn, any turn, and each turn over the episodes that reached it.

    Also the fix rate (wrong first answers that a later turn put right) and the truncated share.
    """
    by_turn: dict[int, list[float]] = defaultdict(list)
    for outcome in outcomes:
        for turn, success in enumerate(outcome.success):
            by_turn[turn].append(success)
    wrong = [outcome for outcome in outcomes if len(outcome.success) > 1 and not outcome.first]
    return {
        "episodes": len(outcomes),
        "first_turn": proportion([outcome.first for outcome in outcomes]).as_dict(),
        "any_turn": proportion([outcome.any for outcome in outcomes]).as_dict(),
        "by_turn": [proportion(by_turn[turn]).as_dict() | {"episodes": len(by_turn[turn])} for turn in sorted(by_turn)],
        "fix_rate": sum(outcome.any for outcome in wrong) / len(wrong) if wrong else None,
        "truncated": sum(outcome.status == "truncated" for outcome in outcomes) / len(outcomes),
    }
