"""Read trajectories as conversations: prompt, turns, calls, feedback and verdicts, without tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from storage.records import Call
from tasks.audit.database import AuditDatabase


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """One turn with the verdicts of the environment and of the score stage."""

    turn: int
    text: str
    environment_verdict: str
    reward: float
    finish_reason: str
    feedback: str  # the environment's reply
    tokens: int
    verdict: str | None  # of the score stage; None without a score
    extracted: str | None
    verdict_reason: str | None
    scored_reward: float | None
    parts: dict[str, float] | None  # of the reward
    follows: int  # the turn that it follows; -1: none
    graded: bool  # False: it answers nothing
    given: str  # what the environment got as the answer
    calls: list[Call]

    @property
    def earned(self) -> float:
        """The reward of the score stage, or that of the environment without a score."""
        return self.reward if self.scored_reward is None else self.scored_reward

    @property
    def said(self) -> str:
        """The feedback; empty if it is no more than the outputs of the calls."""
        outputs = [call.output for call in self.calls if call.status in ("answered", "failed")]
        return "" if outputs and self.feedback == "\n".join(outputs) else self.feedback


@dataclass(frozen=True, slots=True)
class StoredConversation:
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
    fault: str  # what ended it without a verdict: the policy, or the set-up; empty if nothing did
    policy_version: int
    prompt: str
    solutions: list[str]
    turns: list[ConversationTurn]


def read_conversations(database: AuditDatabase, rows: Sequence[int]) -> list[StoredConversation]:
    """Return the trajectories with these row numbers, in this order; unknown row numbers are skipped."""
    calls: dict[tuple[int, int], list[Call]] = {}
    for row, *columns in database.all(
        """select row, turn, id, name, arguments, output, status
        from calls where list_contains(?, row) order by row, turn, number""",
        list(rows),
    ):
        calls.setdefault((row, columns[0]), []).append(Call(*columns))
    turns: dict[int, list[ConversationTurn]] = {}
    for row, *columns in database.all(
        """select row, turn, text, environment_verdict, reward, finish_reason, feedback, "end" - "start", verdict,
            extracted, verdict_reason, scored_reward, parts, follows, answer is not null, given
        from turns where list_contains(?, row) order by row, turn""",
        list(rows),
    ):
        turns.setdefault(row, []).append(ConversationTurn(*[*columns, calls.get((row, columns[0]), [])]))
    conversations = {}
    for values in database.all(
        """select row, trajectory_id, version, t.run, t.iteration, problem_id, sample, status, reason,
            coalesce(fault, ''), policy_version, prompt, solutions
        from trajectories t join data_sets using (data_set) where list_contains(?, row)""",
        list(rows),
    ):
        conversations[values[0]] = StoredConversation(*(*values, turns.get(values[0], [])))
    return [conversations[row] for row in rows if row in conversations]
