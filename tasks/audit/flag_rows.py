"""Note many cases that were found in Python, perhaps millions, in one statement."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from tasks.audit.database import AuditDatabase
from tasks.audit.results import Unit


def flag_rows(
    database: AuditDatabase, check: str, unit: Unit, rows: pa.Table | Mapping[str, Sequence[Any]], query: str
) -> int:
    """Note cases like `AuditDatabase.flag`; `query` may read `rows` as the table `found`. Return the number of cases.

    Args:
        database: the database whose table `cases` gets the cases.
        check: name of the check.
        unit: the unit of the cases.
        rows: the columns of `found`, all of the same length.
        query: SQL with the columns id, number of the data set and detail.
    """
    table = rows if isinstance(rows, pa.Table) else pa.table({name: pa.array(values) for name, values in rows.items()})
    if not table.num_rows:
        return 0
    database.connection.register("found_rows", table)
    try:
        return database.flag(check, unit, f"with found as (from found_rows) {query}")
    finally:
        database.connection.unregister("found_rows")
