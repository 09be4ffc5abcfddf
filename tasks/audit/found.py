"""Cases that were found outside of the database, perhaps millions: noted in one statement."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from tasks.audit.database import AuditDatabase
from tasks.audit.results import Unit


def flag_found(
    database: AuditDatabase, check: str, unit: Unit, rows: pa.Table | Mapping[str, Sequence[Any]], query: str
) -> int:
    """Note cases, as `AuditDatabase.flag` does; `query` may read `rows` as the table `found`. Returns their number.

    Args:
        database: where they are noted.
        check: its name.
        unit: what a case is.
        rows: the columns of `found`, all of one length.
        query: gives id, number of the data set and detail.
    """
    table = rows if isinstance(rows, pa.Table) else pa.table({name: pa.array(values) for name, values in rows.items()})
    if not table.num_rows:
        return 0
    database.connection.register("found_rows", table)
    try:
        return database.flag(check, unit, f"with found as (from found_rows) {query}")
    finally:
        database.connection.unregister("found_rows")
