"""The records that the stages exchange, and their Arrow schemas.

Problem sets, trajectories, scores, histories and curricula are Parquet files of these rows; any
reader of Parquet (DuckDB, pandas) understands them without this package.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

SCHEMA_VERSION = 3  # 2: sequence_starts, 3: unplayed_turns

Status = Literal["completed", "truncated", "rejected", "failed"]
"""completed: the agent ended it. truncated: cut by the token limit of its last turn, or for want of room for the next.
rejected: the agent returned nothing. failed: an error or the deadline; `reason` says which."""

LAST_TURN_CUT = "the last turn reached sampling.max_new_tokens"
"""Reason of a truncated trajectory that ended: its last turn was judged, and nothing was to follow."""

HIGHEST_LOGPROB = 1e-4
"""A logprob is never above 0 but for rounding: GPU kernels compute logit - logsumexp in float32, where logits of some
hundreds have a resolution of 3e-5. More than this is no logprob."""

VerdictName = Literal["correct", "wrong", "unparsable", "timeout", "error"]

Standing = Literal["unknown", "middle", "retired", "suspect"]
"""unknown: too few episodes. retired: solved nearly always. suspect: never solved, its gold answers may be wrong.
middle: all others."""


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
    verdict: str  # the environment's, heard by the agent; the score stage judges again
    reward: float  # raw success as the environment said it, 0 or 1
    finish_reason: str  # stop | length
    feedback: str  # what the agent told the policy next, empty on the last turn
    latency_s: float
    seed: int


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The turns of one episode as one token sequence: prompt, completion 1, feedback 1, completion 2 …

    T is the length of the sequence. Sampled ids are stored as the engine returned them. Where the chat template
    rewrites what was said (thinking models), a turn begins a new sequence; all lie end to end in the same columns.

    Example: Trajectory(trajectory_id="demo/3/12+7/0", run="demo", iteration=3, problem_id="12+7", sample=0, …,
    token_ids=[5, 9, 7], action_mask=[False, False, True], logprobs=[0.0, 0.0, -0.1], versions=[-1, -1, 3])
    """

    trajectory_id: str
    run: str
    iteration: int
    problem_id: str
    sample: int  # position in the group
    status: Status
    reason: str  # why it is not `completed`
    token_ids: list[int]  # T
    action_mask: list[bool]  # T, true on sampled tokens
    logprobs: list[float]  # T, behaviour logprobs; 0 where the mask is false
    versions: list[int]  # T, policy version of each sampled token; -1 where the mask is false
    turns: list[Turn]  # one for each completion
    turn_discount: float  # return of turn k = reward k + turn_discount * return of turn k+1
    prompt: str
    solutions: list[str]
    problem_set: str  # version (store key) of the problem set
    policy: str  # version (store key) of the policy asked for
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
    unplayed_turns: int = -1  # truncated: turns for which the context had no room; -1: nobody knows how many


@dataclass(frozen=True, slots=True)
class Score:
    """The judge's verdict on one turn, beside the trajectories: re-scoring never rewrites tokens.

    Example: Score(trajectory_id="demo/3/12+7/0", turn=0, verdict="correct", success=1.0, extracted="19",
    solution="19", reason="")
    """

    trajectory_id: str
    turn: int
    verdict: VerdictName
    success: float  # 1 or 0
    extracted: str  # what the judge read out of the answer
    solution: str  # the gold solution that matched, or the first
    reason: str  # details of a timeout or an error


@dataclass(frozen=True, slots=True)
class ProblemHistory:
    """What became of one problem in one iteration of a run, over the episodes that did not fail.

    Example: ProblemHistory(problem_key="9f3a", problem_id="12+7", prompt="What is 12 + 7?", solutions=["19"],
    run="demo", iteration=3, policy_version=3, episodes=8, first_turn=2, any_turn=5)
    """

    problem_key: str  # hash of prompt and solutions: ids may be row numbers, which a new file gives to others
    problem_id: str
    prompt: str
    solutions: list[str]
    run: str
    iteration: int
    policy_version: int  # that played
    episodes: int  # 1 or more
    first_turn: int  # episodes whose first turn the score stage found right
    any_turn: int  # episodes of which it found any turn right


@dataclass(frozen=True, slots=True)
class AuditCase:
    """One thing that a check of an audit points at.

    Example: AuditCase(number=0, check_name="text_differs", unit="turn", id="demo/000003/12+7/0",
    data_set="runs/demo/trajectories/000003", detail="turn 1 decodes to '18'")
    """

    number: int  # of its row
    check_name: str  # as in `audit.checks`
    unit: str  # trajectory | turn | group | problem | data set | object
    id: str  # of the trajectory (also for a turn) or problem (also for a group), version, or key of the object
    data_set: str  # version; empty where it belongs to no single one
    detail: str  # what is wrong with it, in words


@dataclass(frozen=True, slots=True)
class CurriculumEntry:
    """How often a run draws a problem, and why.

    Example: CurriculumEntry(problem_id="12+7", problem_key="9f3a", episodes=64, success_rate=0.25,
    standing="middle", weight=0.75)
    """

    problem_id: str
    problem_key: str
    episodes: int  # newest ones, that the rate is made of
    success_rate: float  # share of them with any turn right; 0 without episodes
    standing: Standing
    weight: float  # chances are proportional to it; 0: never drawn


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A trajectory that shall not be trained on. A problem that nobody has played stands in a row without one.

    Example: Exclusion(trajectory_id="demo/000003/12+7/0", data_set="runs/demo/trajectories/000003", run="demo",
    iteration=3, problem_id="12+7", problem_key="9f3a", whole_problem=True, reason="the gold answer is wrong")
    """

    trajectory_id: str  # or empty
    data_set: str  # version in which it lies, or empty
    run: str  # or empty
    iteration: int  # or -1
    problem_id: str
    problem_key: str  # hash of prompt and solutions
    whole_problem: bool  # nor shall the problem be drawn again, or anything else that was played of it be trained on
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


def to_table(rows: list[Any], schema: pa.Schema) -> pa.Table:
    """Rows (dataclass instances) as an Arrow table; nested turns become structs."""
    columns = {}
    for column in schema:
        values = [getattr(row, column.name) for row in rows]
        if column.name == "turns":
            values = [[dataclasses.asdict(turn) for turn in turns] for turns in values]
        columns[column.name] = pa.array(values, column.type)
    return pa.table(columns, schema=schema)


def to_trajectory(row: dict[str, Any]) -> Trajectory:
    """A row of the Parquet file (`Table.to_pylist`) as the record.

    Files of schema 1 have one sequence a row, those before schema 3 do not say how many turns were left unplayed.
    """
    return Trajectory(**{**row, "turns": [Turn(**turn) for turn in row["turns"]]})
