"""The data sets of an audit as tables of DuckDB: `tasks.tables`, and what only the audit and its reader ask of them.

`views.sql` has the queries that several checks, the numbers of the report or the reader share.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from configs.audit import Audit
from storage.records import HIGHEST_LOGPROB, LOWEST_LOGPROB
from tasks.tables.db import TrajectoryDb, open_tables
from tasks.tables.sets import Case, DataSet, Intake, Unit

_VIEWS = Path(__file__).with_name("views.sql")


class AuditDatabase(TrajectoryDb):
    """The tables of an audit, and methods that note and read cases."""

    def count(self, rows: str) -> int:
        """Count rows as `TrajectoryDb.count`, without those of data sets that lack what the present check needs."""
        return super().count(f"(from {rows}) where not is_left_out(data_set)")

    def flag(self, check: str, unit: Unit, query: str) -> int:
        """Note the rows of `query` (id, data_set number, detail) as cases; return their number."""
        insertion = f"""insert into cases
            select '{check}', '{unit}', flagged.id, coalesce(d.version, ''), flagged.detail
            from ({query}) as flagged(id, data_set, detail) left join data_sets d using (data_set)
            where not is_left_out(data_set) order by all"""
        return int(self.number(insertion))

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
        query = """select unit, id, data_set, detail from (
                select *, row_number() over (partition by data_set order by id, detail) as round
                from cases where check_name = ?
            ) order by round, data_set, id, detail limit ?"""
        return [Case(*row) for row in self.all(query, check, limit)]


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
        numbers, kinds = {each.version: each.number for each in data_sets}, ("damaged", "foreign", "orphaned")
        noted = [(kind, case) for kind in kinds for case in getattr(intake, kind)]
        rows = [(kind, case.id, numbers.get(case.data_set), case.detail) for kind, case in noted]
        database.create("intake", "kind varchar, id varchar, data_set integer, detail varchar", rows)
        database.set("objects", intake.objects)
        database.set("parents", intake.parents)
        database.set("collected", len(intake.collected))
        database.set("highest_logprob", HIGHEST_LOGPROB)
        database.set("lowest_logprob", LOWEST_LOGPROB)
        database.connection.execute(_VIEWS.read_text(encoding="utf-8"))
        yield database


Conversation = dict[str, Any]
"""A trajectory without its tokens: a row of `conversations` in `views.sql`."""


def read_conversations(database: AuditDatabase, rows: Sequence[int]) -> list[Conversation]:
    """Return the trajectories with these row numbers, in this order; unknown row numbers are skipped."""
    query = "from conversations(?::bigint[]) order by list_position(?::bigint[], row)"
    return database.records(query, list(rows), list(rows))
