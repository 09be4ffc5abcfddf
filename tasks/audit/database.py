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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from configs.audit import Audit
from storage.records import SCORE_SCHEMA, TRAJECTORY_SCHEMA
from storage.version_names import PolicyVersion, ProblemsVersion, select
from storage.versions.manifests import Manifest
from tasks.audit.intake import Intake
from tasks.audit.results import Case, Unit
from tasks.audit.selection import DataSet
from tasks.audit.tables import TABLES
from tasks.trajectory_db import TrajectoryDb, open_trajectory_db


class AuditDatabase(TrajectoryDb):
    """The tables of an audit, and methods that note and read cases."""

    def flag(self, check: str, unit: Unit, query: str, *parameters: Any) -> int:
        """Note the rows of `query` (id, data_set number, detail) as cases; return their number."""
        before = self.number("select count(*) from cases")
        self.connection.execute(
            f"""insert into cases
            select '{check}', '{unit}', found.id, coalesce(d.version, ''), found.detail
            from ({query}) as found(id, data_set, detail) left join data_sets d using (data_set)
            order by all""",
            parameters,
        )
        return int(self.number("select count(*) from cases") - before)

    def flag_all(self, check: str, cases: Iterable[Case]) -> int:
        """Note `cases`; return their number."""
        rows = [{"check_name": check, **dataclasses.asdict(case)} for case in cases]
        if rows:
            self.connection.register("given", pa.Table.from_pylist(rows))
            self.connection.execute("insert into cases select check_name, unit, id, data_set, detail from given")
            self.connection.unregister("given")
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
        database.connection.execute(
            """create table data_sets (data_set integer, version varchar, run varchar, iteration integer,
            evaluation boolean, allowed integer, policy varchar, policies varchar[], problem_set varchar,
            scorers map(varchar, varchar))"""
        )
        if data_sets:  # executemany refuses an empty list
            database.connection.executemany(
                "insert into data_sets values (?, ?, ?, ?, ?, ?, ?, ?, ?, map(?::varchar[], ?::varchar[]))",
                [_row(each) for each in data_sets],
            )
        database.connection.execute(
            "create table cases (check_name varchar, unit varchar, id varchar, data_set varchar, detail varchar)"
        )
        database.add_view("trajectories", TRAJECTORY_SCHEMA, intake.trajectories)
        database.add_view("scores", SCORE_SCHEMA, intake.scores)
        for statement in TABLES:
            database.connection.execute(statement)
        yield database


def _row(data_set: DataSet) -> tuple[Any, ...]:
    manifest = data_set.manifest
    parents = manifest.parent_names if manifest else []
    policies, scorers = select(PolicyVersion, parents), _scorers(manifest)
    return (
        data_set.number,
        data_set.version,
        data_set.run,
        data_set.iteration,
        data_set.is_evaluation,
        int(manifest.number("rollout.max_head_offpolicyness")) if manifest else 0,
        next(iter(policies), ""),
        policies,
        next(iter(select(ProblemsVersion, parents)), ""),
        list(scorers),
        list(scorers.values()),
    )


def _scorers(manifest: Manifest | None) -> dict[str, str]:
    """Return the scorers by source of problems, as in `configs.score.Score.by_source`."""
    scorer = (manifest.knob("score.type") if manifest else None) or "math-verify"
    return scorer if isinstance(scorer, dict) else {"default": str(scorer)}
