"""The data sets of an audit as tables of DuckDB: `tasks.tables`, and what only the audit and its reader ask of them.

`views.sql` has the queries that several checks, the numbers of the report or the reader share.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from configs.audit import Audit
from storage.grouping import grouped
from storage.records import HIGHEST_LOGPROB, LOWEST_LOGPROB, Call
from tasks.tables.db import TrajectoryDb, open_tables
from tasks.tables.sets import Case, DataSet, Intake, Unit

_VIEWS = Path(__file__).with_name("views.sql")


class AuditDatabase(TrajectoryDb):
    """The tables of an audit, and methods that note and read cases."""

    def count(self, rows: str) -> int:
        """Count rows as `TrajectoryDb.count`, without those of data sets that lack what the present check needs."""
        return super().count(f"(from {rows}) where not is_left_out(data_set)")

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
        flagged = self.number(
            f"""insert into cases
            select '{check}', '{unit}', flagged.id, coalesce(d.version, ''), flagged.detail
            from ({query}) as flagged(id, data_set, detail) left join data_sets d using (data_set)
            where not is_left_out(data_set) order by all""",
            *parameters,
        )
        if found is not None:
            self.connection.unregister("found")
        return int(flagged)

    def set(self, variable: str, value: float | list[int]) -> None:
        """Set a variable that queries read with `getvariable`."""
        self.connection.execute(f"set variable {variable} = {value}")

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
            *(check, limit),
        )
        return [Case(*row) for row in rows]


@contextmanager
def open_database(data_sets: Sequence[DataSet], intake: Intake, settings: Audit) -> Iterator[AuditDatabase]:
    """Open the tables of `data_sets`, with the queries of the audit. They are deleted when the block ends.

    Raises:
        DatabaseError: memory or disk ran out, here or in the block.
    """
    with open_tables(data_sets, intake, settings.memory_gib) as opened:
        database = AuditDatabase(opened.connection, opened.folder)
        database.create("cases", "check_name varchar, unit varchar, id varchar, data_set varchar, detail varchar", [])
        database.set("left_out", [])
        database.set("highest_logprob", HIGHEST_LOGPROB)
        database.set("lowest_logprob", LOWEST_LOGPROB)
        database.connection.execute(_VIEWS.read_text(encoding="utf-8"))
        yield database


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
    def beyond_calls(self) -> str:
        """The feedback; empty if it is no more than the outputs of the calls."""
        outputs = [call.output for call in self.calls if call.status in ("answered", "failed")]
        return "" if outputs and self.feedback == "\n".join(outputs) else self.feedback


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """One trajectory without its tokens."""

    row: int
    trajectory_id: str
    data_set: str  # version
    problem_id: str
    sample: int
    status: str
    reason: str
    policy_version: int
    prompt: str
    solutions: list[str]
    turns: list[ConversationTurn]


def read_conversations(database: AuditDatabase, rows: Sequence[int]) -> list[StoredConversation]:
    """Return the trajectories with these row numbers, in this order; unknown row numbers are skipped."""

    def read(query: str) -> list[tuple[Any, ...]]:
        return database.all(f"{query} where list_contains(?, row) order by all", list(rows))

    found = read("select row, turn, number, id, name, arguments, output, status from calls")
    calls = grouped(((row, turn), Call(turn, *columns)) for row, turn, _, *columns in found)
    found = read(
        """select row, turn, text, environment_verdict, reward, finish_reason, feedback, "end" - "start", verdict,
            extracted, verdict_reason, scored_reward, parts, follows, answer is not null, given from turns"""
    )
    turns = grouped((row, ConversationTurn(*[k, *columns, calls.get((row, k), [])])) for row, k, *columns in found)
    found = read(
        """select row, trajectory_id, version, problem_id, sample, status, reason, policy_version, prompt, solutions
        from trajectories t join data_sets using (data_set)"""
    )
    conversations = {row: StoredConversation(*[row, *columns, turns.get(row, [])]) for row, *columns in found}
    return [conversations[row] for row in rows if row in conversations]
