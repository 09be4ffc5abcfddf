"""The records that the stages exchange, and their Arrow schemas.

Problem sets, trajectories, scores, histories, curricula, audit cases and exclusions are Parquet files of these rows.
Any reader of Parquet (DuckDB, pandas) understands them without this package.
"""

import dataclasses
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

import pyarrow as pa

SCHEMA_VERSION = 3  # 2: sequence_starts, 3: unplayed_turns

Status = Literal["completed", "truncated", "rejected", "failed"]
"""completed: the agent ended the episode. truncated: the token limit cut its last turn, or the context had no room for
the next turn. rejected: the agent returned nothing. failed: an error or the deadline; `reason` says which."""

LAST_TURN_CUT = "the last turn reached sampling.max_new_tokens"
"""Reason of a truncated trajectory that is complete all the same: its last turn was graded, no turn was to follow."""

HIGHEST_LOGPROB = 1e-4
"""Largest logprob that rounding explains. Exact logprobs are at most 0, but GPU kernels compute logit - logsumexp in
float32, where logits of some hundreds have a resolution of 3e-5. A larger value is not a logprob."""

VerdictName = Literal["correct", "wrong", "unparsable", "timeout", "error"]

Standing = Literal["unknown", "middle", "retired", "suspect"]
"""unknown: too few episodes. retired: nearly always solved. suspect: never solved, so its gold answers may be wrong.
middle: all other problems."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One item of a problem set.

    Example: Problem(problem_id="12+7", prompt="What is 12 + 7?", solutions=["19"], source="arithmetic")
    """

    problem_id: str
    prompt: str
    solutions: list[str]  # 1 or more gold answers, LaTeX or plain; any of them counts
    source: str = ""
    metadata: str = "{}"  # JSON object: level, subject, …


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion and the environment's reply.

    Example: Turn(start=18, end=25, text="19", verdict="correct", reward=1.0, finish_reason="stop",
    feedback="", latency_s=0.2, seed=77)
    """

    start: int  # the completion is token_ids[start:end]
    end: int
    text: str
    verdict: str  # the environment's, which the agent received; the score stage grades again
    reward: float  # raw success according to the environment, 0 or 1
    finish_reason: str  # stop | length
    feedback: str  # what the agent gave to the policy next; empty on the last turn
    latency_s: float
    seed: int


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The turns of one episode as one token sequence: prompt, completion 1, feedback 1, completion 2 …

    T is the length of the sequence. Sampled ids are stored as the engine returned them. If the chat template rewrites
    earlier turns (thinking models), a turn begins a new sequence; all sequences follow each other in the same columns.

    Example: Trajectory(trajectory_id="demo/3/12+7/0", run="demo", iteration=3, problem_id="12+7", sample=0, …,
    token_ids=[5, 9, 7], action_mask=[False, False, True], logprobs=[0.0, 0.0, -0.1], versions=[-1, -1, 3])
    """

    trajectory_id: str
    run: str
    iteration: int
    problem_id: str
    sample: int  # position in the group
    status: Status
    reason: str  # why the status is not `completed`
    token_ids: list[int]  # T
    action_mask: list[bool]  # T, true on sampled tokens
    logprobs: list[float]  # T, behaviour logprobs; 0 where the mask is false
    versions: list[int]  # T, policy version of each sampled token; -1 where the mask is false
    turns: list[Turn]  # one for each completion
    turn_discount: float  # return of turn k = reward k + turn_discount * return of turn k+1
    prompt: str
    solutions: list[str]
    problem_set: str  # version (store key) of the problem set
    policy: str  # version (store key) of the requested policy
    policy_version: int
    sampling: str  # JSON
    agent: str
    agent_args: str  # JSON
    environment: str
    environment_args: str  # JSON
    seed: int
    started_at: float  # seconds since the epoch
    latency_s: float
    sequence_starts: list[int] = field(default_factory=lambda: [0])  # where each sequence begins in token_ids
    unplayed_turns: int = -1  # truncated: turns for which the context had no room; -1: unknown


@dataclass(frozen=True, slots=True)
class Score:
    """The stored verdict on one turn. Scores are stored apart from trajectories, so re-scoring never rewrites tokens.

    Example: Score(trajectory_id="demo/3/12+7/0", turn=0, verdict="correct", success=1.0, extracted="19",
    solution="19", reason="")
    """

    trajectory_id: str
    turn: int
    verdict: VerdictName
    success: float  # 1 or 0
    extracted: str  # what the verifier read as the answer
    solution: str  # the gold solution that matched, or the first
    reason: str  # details of a timeout or an error


@dataclass(frozen=True, slots=True)
class ProblemHistory:
    """The results of one problem in one iteration of a run, over the episodes that did not fail.

    Example: ProblemHistory(problem_key="9f3a", problem_id="12+7", prompt="What is 12 + 7?", solutions=["19"],
    run="demo", iteration=3, policy_version=3, episodes=8, first_turn=2, any_turn=5)
    """

    problem_key: str  # hash of prompt and solutions; ids may be row numbers, which a new file gives to other problems
    problem_id: str
    prompt: str
    solutions: list[str]
    run: str
    iteration: int
    policy_version: int  # policy version that played
    episodes: int  # 1 or more
    first_turn: int  # episodes whose first turn is right, according to the score stage
    any_turn: int  # episodes with any right turn


@dataclass(frozen=True, slots=True)
class AuditCase:
    """One case: a thing that an audit check points at.

    Example: AuditCase(number=0, check_name="text_differs", unit="turn", id="demo/000003/12+7/0",
    data_set="runs/demo/trajectories/000003", detail="turn 1 decodes to '18'")
    """

    number: int  # number of its row
    check_name: str  # as in `audit.checks`
    unit: str  # trajectory | turn | group | problem | data set | object
    id: str  # id of the trajectory (also for a turn) or problem (also for a group); or a version, or an object's key
    data_set: str  # version of the data set; empty if the case belongs to no single one
    detail: str  # what is wrong with it, in words


@dataclass(frozen=True, slots=True)
class CurriculumEntry:
    """The weight with which a run draws a problem, and the reason for it.

    Example: CurriculumEntry(problem_id="12+7", problem_key="9f3a", episodes=64, success_rate=0.25,
    standing="middle", weight=0.75)
    """

    problem_id: str
    problem_key: str
    episodes: int  # number of newest episodes that the rate counts
    success_rate: float  # share of them with any right turn; 0 without episodes
    standing: Standing
    weight: float  # proportional to the chance that the problem is drawn; 0: never drawn


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A trajectory that is kept out of training. A problem that was never played has a row without a trajectory.

    Example: Exclusion(trajectory_id="demo/000003/12+7/0", data_set="runs/demo/trajectories/000003", run="demo",
    iteration=3, problem_id="12+7", problem_key="9f3a", whole_problem=True, reason="the gold answer is wrong")
    """

    trajectory_id: str  # or empty
    data_set: str  # version that holds the trajectory, or empty
    run: str  # or empty
    iteration: int  # or -1
    problem_id: str
    problem_key: str  # hash of prompt and solutions
    whole_problem: bool  # also exclude the problem from being drawn, and all its other trajectories from training
    reason: str


def _schema(kind: str, *fields: tuple[str, pa.DataType]) -> pa.Schema:
    metadata: dict[bytes | str, bytes | str] = {"kind": kind, "schema_version": str(SCHEMA_VERSION)}
    return pa.schema([pa.field(name, type_, nullable=False) for name, type_ in fields], metadata=metadata)


PROBLEM_SCHEMA = _schema(
    "problems",
    ("problem_id", pa.string()),
    ("prompt", pa.string()),
    ("solutions", pa.list_(pa.string())),
    ("source", pa.string()),
    ("metadata", pa.string()),
)

_TURN = pa.struct(
    [
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("text", pa.string()),
        ("verdict", pa.string()),
        ("reward", pa.float32()),
        ("finish_reason", pa.string()),
        ("feedback", pa.string()),
        ("latency_s", pa.float32()),
        ("seed", pa.int64()),
    ]
)

TRAJECTORY_SCHEMA = _schema(
    "trajectories",
    ("trajectory_id", pa.string()),
    ("run", pa.string()),
    ("iteration", pa.int32()),
    ("problem_id", pa.string()),
    ("sample", pa.int32()),
    ("status", pa.string()),
    ("reason", pa.string()),
    ("token_ids", pa.list_(pa.int32())),
    ("action_mask", pa.list_(pa.bool_())),
    ("logprobs", pa.list_(pa.float32())),
    ("versions", pa.list_(pa.int32())),
    ("turns", pa.list_(_TURN)),
    ("turn_discount", pa.float32()),
    ("prompt", pa.string()),
    ("solutions", pa.list_(pa.string())),
    ("problem_set", pa.string()),
    ("policy", pa.string()),
    ("policy_version", pa.int32()),
    ("sampling", pa.string()),
    ("agent", pa.string()),
    ("agent_args", pa.string()),
    ("environment", pa.string()),
    ("environment_args", pa.string()),
    ("seed", pa.int64()),
    ("started_at", pa.float64()),
    ("latency_s", pa.float32()),
    ("sequence_starts", pa.list_(pa.int32())),
    ("unplayed_turns", pa.int32()),
)

SCORE_SCHEMA = _schema(
    "scores",
    ("trajectory_id", pa.string()),
    ("turn", pa.int32()),
    ("verdict", pa.string()),
    ("success", pa.float32()),
    ("extracted", pa.string()),
    ("solution", pa.string()),
    ("reason", pa.string()),
)

HISTORY_SCHEMA = _schema(
    "history",
    ("problem_key", pa.string()),
    ("problem_id", pa.string()),
    ("prompt", pa.string()),
    ("solutions", pa.list_(pa.string())),
    ("run", pa.string()),
    ("iteration", pa.int32()),
    ("policy_version", pa.int32()),
    ("episodes", pa.int32()),
    ("first_turn", pa.int32()),
    ("any_turn", pa.int32()),
)

CURRICULUM_SCHEMA = _schema(
    "curriculum",
    ("problem_id", pa.string()),
    ("problem_key", pa.string()),
    ("episodes", pa.int32()),
    ("success_rate", pa.float64()),
    ("standing", pa.string()),
    ("weight", pa.float64()),
)


CASE_SCHEMA = _schema(
    "audit",
    ("number", pa.int64()),
    ("check_name", pa.string()),
    ("unit", pa.string()),
    ("id", pa.string()),
    ("data_set", pa.string()),
    ("detail", pa.string()),
)


EXCLUSION_SCHEMA = _schema(
    "exclusions",
    ("trajectory_id", pa.string()),
    ("data_set", pa.string()),
    ("run", pa.string()),
    ("iteration", pa.int32()),
    ("problem_id", pa.string()),
    ("problem_key", pa.string()),
    ("whole_problem", pa.bool_()),
    ("reason", pa.string()),
)


_TURN_NAMES = [field.name for field in dataclasses.fields(Turn)]
_turn_values = attrgetter(*_TURN_NAMES)


def to_table(rows: list[Any], schema: pa.Schema) -> pa.Table:
    """Convert rows (dataclass instances) to an Arrow table; nested turns become structs."""
    columns = {}
    for column in schema:
        values = [getattr(row, column.name) for row in rows]
        if column.name == "turns":
            values = [[dict(zip(_TURN_NAMES, _turn_values(turn), strict=True)) for turn in turns] for turns in values]
        columns[column.name] = pa.array(values, column.type)
    return pa.table(columns, schema=schema)


def to_trajectory(row: dict[str, Any]) -> Trajectory:
    """Convert a row of a Parquet file (`Table.to_pylist`) to a record.

    In files of schema 1 each row is one sequence. Files before schema 3 do not have the number of unplayed turns.
    """
    return Trajectory(**{**row, "turns": [Turn(**turn) for turn in row["turns"]]})
