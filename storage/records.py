"""The records that the stages exchange, and their Arrow schemas.

Problem sets, trajectories, annotations, scores, curricula, audit cases and exclusions are Parquet files of
these rows. Any reader of Parquet (DuckDB, pandas) understands them without this package. The columns are the fields of
the record.
"""

import dataclasses
import io
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Int64 = Annotated[int, "64 bits"]
"""A whole number that needs 64 bits in a column; others have 32."""
Float64 = Annotated[float, "64 bits"]
"""A number that needs 64 bits in a column; others have 32."""

SCHEMA_VERSION = 6
"""2: sequence_starts. 3: unplayed_turns. 4: calls, branches, parts of rewards, source and metadata; rewards of
scores. 5: the fault at an end without a verdict, answers, limits, and the order in which turns were asked and paid. 6:
the experts that the engine chose."""

Status = Literal["completed", "truncated", "rejected", "failed"]
"""completed: the agent ended the episode. truncated: the token limit cut its last turn, or the context had no room for
the next turn. rejected: the agent returned nothing. failed: an error or the deadline; `reason` says which."""

Fault = Literal["", "policy", "set-up"]
"""The cause of an end without a verdict. policy: its own behaviour, such as a full context, too many requests, or
sampling until the deadline. set-up: an error of the agent, the environment, the engine or the machine."""

LAST_TURN_CUT = "the last turn reached sampling.max_new_tokens"
"""Reason of a truncated trajectory that is complete all the same: its last turn was graded, no turn was to follow."""

HIGHEST_LOGPROB = 1e-4
"""Largest logprob that rounding explains. Exact logprobs are at most 0, but GPU kernels compute logit - logsumexp in
float32, where logits of some hundreds have a resolution of 3e-5. A larger value is not a logprob."""

LOWEST_LOGPROB = -87.34
"""Smallest logprob that sampling explains, that of float32's smallest normal number, 2^-126. Servers draw with float32
probabilities, and even in exact arithmetic some token of a vocabulary of a million is below it once in 1e32 draws. Down
to it 1 / probability is finite in float32, too. What servers write for minus infinity, such as -9999, is far below."""

VerdictName = Literal["correct", "wrong", "unparsable", "timeout", "error", "none"]
"""none: the turn answers nothing, such as a call of a tool. It has no reward, and counts in no accuracy."""

CallStatus = Literal["answered", "failed", "unanswered", "unparsable"]
"""answered: the tool's output followed. failed: an error of the tool, or of the arguments, followed. unanswered: the
agent sent no output. unparsable: the policy wrote something like a call that cannot be read, whatever it was told."""

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
    solutions: list[str]  # gold answers, LaTeX or plain; any of them counts. Games and code problems may have none
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
    reward: float  # the environment's, raw: any finite number; 0 or 1 for verdicts on answers
    finish_reason: str  # stop | length
    feedback: str  # what the agent gave to the policy next; empty on the last turn
    latency_s: float
    seed: Int64


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a tool in a completion, and what the tool answered.

    Example: Call(turn=0, id="call-1", name="calculator", arguments='{"expression": "12 + 7"}', output="19",
    status="answered")
    """

    turn: int  # the turn whose completion contains the call
    id: str
    name: str
    arguments: str  # JSON as the policy wrote it; the whole text of a call that cannot be parsed
    output: str  # empty without an answer
    status: CallStatus


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The turns of one episode as one token sequence: prompt, completion 1, feedback 1, completion 2 …

    T is the length of the sequence. Sampled ids are stored as the engine returned them. If the chat template rewrites
    earlier turns (thinking models), or an agent goes back to an earlier point of the conversation or begins another
    one, a turn begins a new sequence; all sequences follow each other in the same columns. A completion that occurs in
    several sequences is a turn of one of them.

    Trajectories of other programs (`tasks.audit.importing`) may have no tokens: T is 0, and all turns begin and end at
    0.

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
    logprobs: list[float]  # T, behaviour logprobs; 0 where the mask is false; null: imported without them
    versions: list[int]  # T, policy version of each sampled token; -1 where the mask is false, or if it is unknown
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
    seed: Int64
    started_at: Float64  # seconds since the epoch
    latency_s: float
    sequence_starts: list[int] = field(default_factory=lambda: [0])  # where each sequence begins in token_ids
    unplayed_turns: int = -1  # of an episode without its last verdict: answers that are missing; -1: unknown
    source: str = ""  # the problem's
    metadata: str = "{}"  # the problem's, JSON
    calls: list[Call] = field(default_factory=list)  # by turn
    ungraded: list[int] = field(default_factory=list)  # turns that answer nothing, such as calls of tools
    follows: list[int] = field(default_factory=list)  # K, the turn that each one follows, -1: none; []: the one before
    reward_parts: list[dict[str, float]] = field(default_factory=list)  # K, the named parts of each reward; []: none
    fault: Fault = ""  # of an episode that ended without a verdict; empty for others, and in files before schema 5
    answers: list[str | None] = field(default_factory=list)  # K, given to the environment; null: the text; []: all null
    limits: list[int] = field(default_factory=list)  # K, most tokens of the turn; []: as `sampling` says
    received: list[int] = field(default_factory=list)  # K, position among the completions that the agent got, or -1
    asked: list[int] = field(default_factory=list)  # K, how many completions the agent had when it asked for this one
    # K, how many completions the agent had when this turn's reward was given, which pays all of them; 0: none was given
    paid: list[int] = field(default_factory=list)
    # received, asked and paid are [] in a chain, where turn k is asked with k completions and paid with k + 1
    experts: bytes = b""  # of a mixture of experts, that the engine chose for each token (`pack_experts`), or empty


@dataclass(frozen=True, slots=True)
class Score:
    """The stored verdict on one turn. Scores are stored apart from trajectories, so re-scoring never rewrites tokens.

    Example: Score(trajectory_id="demo/3/12+7/0", turn=0, verdict="correct", success=1.0, extracted="19",
    solution="19", reason="", reward=1.0)
    """

    trajectory_id: str
    turn: int
    verdict: VerdictName
    success: float  # 1 or 0
    extracted: str  # what the verifier read as the answer
    solution: str  # the gold solution that matched, or the first
    reason: str  # details of a timeout or an error
    reward: float  # raw: any finite number; the success, unless the scorer knows better
    parts: dict[str, float] = field(default_factory=dict)  # the named parts of the reward


@dataclass(frozen=True, slots=True)
class Annotation:
    """The answer of a model beside the policy about one turn, or about a trajectory.

    Example, of a judge: Annotation(trajectory_id="demo/3/12+7/0", turn=0, model="sha256:5c0e…", prompt="Grade …",
    answer="Score: 10")
    """

    trajectory_id: str
    turn: int  # -1: the whole trajectory
    model: str  # sha256:… of its files, or name:… of a service, which nothing proves
    prompt: str = ""  # what a judge was asked: the text of its only message
    answer: str = ""  # what it said
    value: float = 0.0  # of a reward model
    logprobs: list[float] = field(default_factory=list)  # T, a teacher's of each token; 0 where a sequence begins
    problem: str = ""  # why the model said nothing, such as a prompt that is too long


@dataclass(frozen=True, slots=True)
class AuditCase:
    """One case: a thing that an audit check points at.

    Example: AuditCase(number=0, check_name="text_differs", unit="turn", id="demo/000003/12+7/0",
    data_set="runs/demo/trajectories/000003", detail="turn 1 decodes to '18'")
    """

    number: Int64  # number of its row
    check_name: str  # as in `audit.checks`
    unit: str  # trajectory | turn | call | group | problem | data set | object
    id: str  # of the trajectory (also that of a turn or call), problem (also that of a group), version or object
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
    success_rate: Float64  # share of them with any right turn; 0 without episodes
    standing: Standing
    weight: Float64  # proportional to the chance that the problem is drawn; 0: never drawn


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
    problem_key: str  # `tasks.problems.problem_set.key`
    whole_problem: bool  # also exclude the problem from being drawn, and all its other trajectories from training
    reason: str


_TYPES: dict[Any, pa.DataType] = {
    str: pa.string(),
    bytes: pa.binary(),
    bool: pa.bool_(),
    int: pa.int32(),
    float: pa.float32(),
    Int64: pa.int64(),
    Float64: pa.float64(),
}


def _arrow_type(hint: Any) -> pa.DataType:
    """Return the Arrow type of a field; None among its types needs none of its own, since lists may hold null."""
    arguments = get_args(hint)
    if hint in _TYPES:
        return _TYPES[hint]
    if dataclasses.is_dataclass(hint):
        fields = get_type_hints(hint, include_extras=True)
        return pa.struct([(name, _arrow_type(each)) for name, each in fields.items()])
    if get_origin(hint) is Literal:
        return pa.string()
    if get_origin(hint) is list:
        return pa.list_(_arrow_type(arguments[0]))
    if get_origin(hint) is dict:
        return pa.map_(_arrow_type(arguments[0]), _arrow_type(arguments[1]))
    assert arguments[1:] == (type(None),), hint
    return _arrow_type(arguments[0])


def _schema(kind: str, record: type) -> pa.Schema:
    """Return the schema of files with rows of a record, in the order of its fields."""
    hints = get_type_hints(record, include_extras=True)
    metadata: dict[bytes | str, bytes | str] = {"kind": kind, "schema_version": str(SCHEMA_VERSION)}
    return pa.schema([pa.field(name, _arrow_type(hint), nullable=False) for name, hint in hints.items()], metadata)


PROBLEM_SCHEMA = _schema("problems", Problem)
TRAJECTORY_SCHEMA = _schema("trajectories", Trajectory)
SCORE_SCHEMA = _schema("scores", Score)
ANNOTATION_SCHEMA = _schema("annotations", Annotation)
CURRICULUM_SCHEMA = _schema("curriculum", CurriculumEntry)
CASE_SCHEMA = _schema("audit", AuditCase)
EXCLUSION_SCHEMA = _schema("exclusions", Exclusion)

_STRUCTS = {"turns": Turn, "calls": Call}
"""The columns whose values are lists of records."""
_FIELDS = {name: [field.name for field in dataclasses.fields(record)] for name, record in _STRUCTS.items()}


def to_table(rows: list[Any], schema: pa.Schema) -> pa.Table:
    """Convert rows (dataclass instances) to an Arrow table; nested records become structs."""
    columns = {}
    for column in schema:
        values = [getattr(row, column.name) for row in rows]
        if (names := _FIELDS.get(column.name)) and pa.types.is_list(column.type):
            values = [[{name: getattr(record, name) for name in names} for record in records] for records in values]
        columns[column.name] = pa.array(values, column.type)
    return pa.table(columns, schema=schema)


def to_trajectory(row: dict[str, Any]) -> Trajectory:
    """Convert a row of a Parquet file (`Table.to_pylist`) to a record.

    In files of schema 1 each row is one sequence. Files before schema 3 do not have the number of unplayed turns, those
    before schema 4 neither calls nor branches, reward parts or the problem's source and metadata, those before schema 5
    neither faults, answers nor limits, those before schema 6 no experts.
    """
    records = {name: [record(**each) for each in row.get(name, ())] for name, record in _STRUCTS.items()}
    parts = [dict(parts) for parts in row.get("reward_parts", ())]
    return Trajectory(**{**row, **records, "reward_parts": parts})


def to_score(row: dict[str, Any]) -> Score:
    """Convert a row of a Parquet file to a record; in files before schema 4 the reward is the success."""
    return Score(**{"reward": row["success"], **row, "parts": dict(row.get("parts", ()))})


Experts = npt.NDArray[np.int16]
"""The numbers of the experts, [T, layers, experts per token]; -1: unknown, as that of the last token of a sequence."""


def pack_experts(experts: Experts) -> bytes:
    """Return a value of the column `experts` of trajectories: a file in NumPy's format .npy.

    Example of reading it: `numpy.load(io.BytesIO(row["experts"]))`
    """
    with io.BytesIO() as file:
        np.save(file, experts, allow_pickle=False)
        return file.getvalue()


def unpack_experts(stored: bytes) -> Experts:
    """Read a value of the column `experts`.

    Raises:
        ValueError: it is not such a file, or has other numbers than those of experts.
    """
    try:
        read = np.lib.format.read_array(io.BytesIO(stored), allow_pickle=False)  # type: ignore[no-untyped-call]
    except (ValueError, MemoryError) as error:
        raise ValueError(f"experts are not a file in NumPy's format .npy: {error}") from None
    if read.ndim != 3:
        raise ValueError(f"experts of the shape {read.shape}, not [tokens, layers, experts per token]")
    if read.dtype.kind not in "iu" or (read.size and not -1 <= read.min() <= read.max() < 2**15):
        raise ValueError("experts that are no numbers from -1 (unknown) to 32767")  # in 16 bits they would be others
    experts: Experts = read.astype(np.int16)
    return experts
