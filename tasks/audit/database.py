"""The data sets of an audit as tables of DuckDB.

data_sets      data_set (number), version, run, iteration, evaluation, allowed (staleness), policies (those among its
               parents), policy (the first of them), problem_set, scorers (a map from sources of problems to scorers)
trajectories   a view of the Parquet files: all columns of `storage.records.Trajectory`, data_set, row
scores         a view of the Parquet files: all columns of `storage.records.Score`, data_set
episodes       one row for each trajectory, without tokens: row, data_set, run, iteration, trajectory_id, problem_id,
               sample, status, reason, turns, sampled (tokens), policy_version, calls (number), branches (number of
               turns that follow the same turn as an earlier one, or begin another conversation); first and best:
               success of the first and of the best graded turn, null without scores
turns          one row for each turn: row, data_set, run, iteration, trajectory_id, problem_id, sample, turn, "last",
               "start", "end", text, given (what the environment got as the answer), environment_verdict, reward,
               finish_reason, feedback, seed; follows (the turn that it follows, -1: none); calls (number); answer (its
               number among the graded turns, null for calls of tools and others that answer nothing); parts (a map of
               its reward's parts, those of the score if it has any); scorer (its name in `score.type`); from its
               score, null without one: verdict, success (null, too, if it answers nothing), extracted, solution,
               verdict_reason, scored_reward
calls          one row for each call of a tool: row, data_set, trajectory_id, problem_id, turn, number (among the calls
               of its turn, from 0 on), id, name, arguments, output, status
revisions      one row for each graded turn that comes after another one in its conversation: row, data_set,
               trajectory_id, turn, success, before (the graded turn before it), was (the success of that)
problems       one row for each distinct problem: problem_id, prompt, solutions, math_verify (whether that scores it)
cases          one row for each case of a check: check_name, unit, id, data_set (version), detail

`row` is a number that is unique to each trajectory row, even if two rows have the same id.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from configs.audit import Audit
from storage.records import SCORE_SCHEMA, TRAJECTORY_SCHEMA, Call
from storage.version_names import PolicyVersion, ProblemsVersion, select
from storage.versions.manifests import Manifest
from tasks.audit.data_sets import DataSet, Intake
from tasks.audit.results import Case, Unit
from tasks.trajectory_db import TrajectoryDb, open_trajectory_db


class AuditDatabase(TrajectoryDb):
    """The tables of an audit, and methods that note and read cases."""

    def flag(
        self,
        check: str,
        unit: Unit,
        query: str,
        *parameters: Any,
        found: pa.Table | Sequence[Mapping[str, Any]] | None = None,
    ) -> int:
        """Note the rows of `query` (id, data_set number, detail) as cases; return their number.

        `found` has what Python found, perhaps a million rows: the query may read it as the table `found`.
        """
        if found is not None:
            if not len(found):
                return 0
            table = found if isinstance(found, pa.Table) else pa.Table.from_pylist(list(found))
            self.connection.register("found", table)
        before = self.count("cases")
        self.connection.execute(
            f"""insert into cases
            select '{check}', '{unit}', flagged.id, coalesce(d.version, ''), flagged.detail
            from ({query}) as flagged(id, data_set, detail) left join data_sets d using (data_set)
            order by all""",
            parameters,
        )
        if found is not None:
            self.connection.unregister("found")
        return self.count("cases") - before

    def flag_all(self, check: str, cases: Iterable[Case]) -> int:
        """Note `cases`; return their number."""
        rows = [(check, *dataclasses.astuple(case)) for case in cases]
        self.insert("cases", rows)
        return len(rows)

    def cases(self, check: str, limit: int) -> list[Case]:
        """Return the first cases of a check: one of each data set, then the second of each, and so on."""
        rows = self.all(
            """select unit, id, data_set, detail from (
                select *, row_number() over (partition by data_set order by id, detail) as round
                from cases where check_name = ?
            ) order by round, data_set, id, detail limit ?""",
            check,
            limit,
        )
        return [Case(*row) for row in rows]


@contextmanager
def open_database(data_sets: Sequence[DataSet], intake: Intake, settings: Audit) -> Iterator[AuditDatabase]:
    """Open the tables of `data_sets`. They are deleted when the block ends.

    Raises:
        DatabaseError: memory or disk ran out, here or in the block.
    """
    with open_trajectory_db(settings.memory_gib) as opened:
        database = AuditDatabase(opened.connection, opened.folder)
        database.add_view("trajectories", TRAJECTORY_SCHEMA, intake.trajectories)
        database.add_view("scores", SCORE_SCHEMA, intake.scores)
        database.connection.execute(_EMPTY_TABLES)
        if data_sets:  # executemany refuses an empty list
            database.connection.executemany(
                "insert into data_sets values (?, ?, ?, ?, ?, ?, ?, ?, ?, map(?::varchar[], ?::varchar[]))",
                [_row(each) for each in data_sets],
            )
        database.connection.execute(_TABLES)
        yield database


def _row(data_set: DataSet) -> tuple[Any, ...]:
    manifest = data_set.manifest
    parents = manifest.parent_names if manifest else []
    policies, scorers = select(PolicyVersion, parents), _scorers(manifest)
    return (
        *(data_set.number, data_set.version, data_set.run, data_set.iteration, data_set.is_evaluation),
        int(manifest.number("rollout.max_head_offpolicyness")) if manifest else 0,
        *(next(iter(policies), ""), policies, next(iter(select(ProblemsVersion, parents)), "")),
        *(list(scorers), list(scorers.values())),
    )


def _scorers(manifest: Manifest | None) -> dict[str, str]:
    """Return the scorers by source of problems, as in `configs.score.Score.by_source`."""
    scorer = (manifest.knob("score.type") if manifest else None) or "math-verify"
    return scorer if isinstance(scorer, dict) else {"default": str(scorer)}


_EMPTY_TABLES = """
    create table data_sets (data_set integer, version varchar, run varchar, iteration integer, evaluation boolean,
        allowed integer, policy varchar, policies varchar[], problem_set varchar, scorers map(varchar, varchar));
    create table cases (check_name varchar, unit varchar, id varchar, data_set varchar, detail varchar);"""


_TABLES = """
    create table calls as
    select row, data_set, trajectory_id, problem_id, call.turn,
           (row_number() over (partition by row, call.turn order by place) - 1)::integer as number,
           call.id, call.name, call.arguments, call.output, call.status
    from (
        select row, data_set, trajectory_id, problem_id, unnest(calls) as call, generate_subscripts(calls, 1) as place
        from trajectories
    );
    -- If a turn has several scores, the first is used; the check `orphan_scores` reports the others.
    create table turns as
    with spoken as (
        select row, data_set, run, iteration, trajectory_id, problem_id, sample, unnest(turns) as t,
               generate_subscripts(turns, 1) - 1 as turn, len(turns) as turns, ungraded, reward_parts, answers,
               follows, coalesce(scorers[source], scorers['default']) as scorer
        from trajectories join (select data_set, scorers from data_sets) using (data_set)
    ), judged as (
        select distinct on (data_set, trajectory_id, turn) data_set, trajectory_id, turn, verdict, success, extracted,
               solution, reason, coalesce(reward, success) as scored_reward, parts
        from scores order by row
    ), joined as (
        select s.*, j.* exclude (data_set, trajectory_id, turn),
               coalesce(verdict = 'none', list_contains(ungraded, s.turn) or t.verdict = 'none', false) as silent
        from spoken s left join judged j using (data_set, trajectory_id, turn)
    )
    select s.row, s.data_set, s.run, s.iteration, s.trajectory_id, s.problem_id, s.sample, s.turn::integer as turn,
           s.turn = s.turns - 1 as "last", s.t."start"::bigint as "start", s.t."end"::bigint as "end", s.t.text as text,
           coalesce(s.answers[s.turn + 1], s.t.text) as given,
           s.t.verdict as environment_verdict, s.t.reward as reward, s.t.finish_reason as finish_reason,
           s.t.feedback as feedback, s.t.seed as seed,
           coalesce(s.follows[s.turn + 1], s.turn - 1)::integer as follows, coalesce(c.calls, 0)::integer as calls,
           if(silent, null, row_number() over (partition by s.row, silent order by s.turn) - 1)::integer as answer,
           if(cardinality(parts) > 0, parts, reward_parts[s.turn + 1]) as parts, scorer, verdict,
           if(silent, null, success) as success, extracted, solution, s.reason as verdict_reason, scored_reward
    from joined s left join (select row, turn, count(*) as calls from calls group by 1, 2) c using (row, turn);
    create table episodes as
    select t.row, t.data_set, t.run, t.iteration, t.trajectory_id, t.problem_id, t.sample, t.status, t.reason,
           len(t.turns)::integer as turns, list_count(list_filter(t.action_mask, lambda m: m))::integer as sampled,
           t.policy_version, coalesce(len(t.calls), 0)::integer as calls,
           coalesce(len(t.follows) - list_unique(t.follows), 0)::integer as branches, g.first, g.best
    from trajectories t
    left join (select row, max(success) filter (answer = 0) as first, max(success) as best from turns group by row) g
    using (row);
    -- From each graded turn up its branch, past calls of tools, to the graded turn before it.
    create table revisions as
    with recursive climbing as (
        select row, turn, follows as before from turns where answer is not null and follows >= 0
        union
        select c.row, c.turn, t.follows from climbing c join turns t on t.row = c.row and t.turn = c.before
        where t.answer is null and t.follows >= 0
    )
    select t.row, t.data_set, t.trajectory_id, t.turn, t.success, c.before, b.success as was
    from climbing c join turns t on t.row = c.row and t.turn = c.turn
    join turns b on b.row = c.row and b.turn = c.before where b.answer is not null;
    create table problems as
    select problem_id, prompt, solutions,
           bool_or(coalesce(scorers[source], scorers['default']) = 'math-verify') as math_verify
    from trajectories join (select data_set, scorers from data_sets) using (data_set) group by 1, 2, 3"""


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """One turn without its tokens, with the verdicts of the environment and of the score stage."""

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
    found = database.all(
        """select row, trajectory_id, version, t.run, t.iteration, problem_id, sample, status, reason,
            coalesce(fault, ''), policy_version, prompt, solutions
        from trajectories t join data_sets using (data_set) where list_contains(?, row)""",
        list(rows),
    )
    conversations = {row: StoredConversation(*[row, *columns, turns.get(row, [])]) for row, *columns in found}
    return [conversations[row] for row in rows if row in conversations]
