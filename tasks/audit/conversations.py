"""Episodes as people read them."""

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.audit.database import AuditDatabase


@dataclass(frozen=True, slots=True)
class SpokenTurn:
    """One turn, with what environment and score stage said about it."""

    turn: int
    text: str
    said: str  # the environment's verdict
    reward: float
    finish_reason: str
    feedback: str  # what the policy was told next
    tokens: int
    verdict: str | None  # the score stage's; None without a score
    extracted: str | None
    judge_reason: str | None


@dataclass(frozen=True, slots=True)
class Conversation:
    """One trajectory without its tokens."""

    row: int
    trajectory_id: str
    data_set: str  # version
    run: str
    iteration: int
    problem_id: str
    sample: int
    status: str
    reason: str
    policy_version: int
    prompt: str
    solutions: list[str]
    turns: list[SpokenTurn]


def read_conversations(database: AuditDatabase, rows: Sequence[int]) -> list[Conversation]:
    """The trajectories with these row numbers, in this order; unknown ones are left out."""
    spoken: dict[int, list[SpokenTurn]] = {}
    for row, *columns in database.all(
        """select row, turn, text, said, reward, finish_reason, feedback, "end" - "start", verdict, extracted,
            judge_reason
        from turns where list_contains(?, row) order by row, turn""",
        list(rows),
    ):
        spoken.setdefault(row, []).append(SpokenTurn(*columns))
    found = {}
    for found_row in database.all(
        """select row, trajectory_id, version, t.run, t.iteration, problem_id, sample, status, reason,
            policy_version, prompt, solutions
        from trajectories t join data_sets using (data_set) where list_contains(?, row)""",
        list(rows),
    ):
        found[found_row[0]] = Conversation(*(*found_row, spoken.get(found_row[0], [])))
    return [found[row] for row in rows if row in found]
