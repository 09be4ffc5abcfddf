"""Read the reader's data: lists of trajectories that match a filter, and single trajectories with their tokens.

Example: the address "/?turn=first&verdict=wrong&page=2" gives Filter(turn="first", verdict="wrong"); its second page of
results is shown.
"""

import glob
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlencode

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from storage.records import CallStatus, Status, Trajectory, VerdictName, to_trajectory
from storage.versions.datasets import check_schema
from tasks.audit.database import AuditDatabase

_TABLES = Path(__file__).parent / "listing.sql"
_CACHED_LISTS = 4  # results of filters, 8 bytes for each trajectory

RowNumbers = npt.NDArray[np.int64]
NOTHING: RowNumbers = np.zeros(0, np.int64)


class Filter(BaseModel):
    r"""The conditions for trajectories; field names are the names of the parameters in the address.

    `turn` says in which turns verdict and reward are searched; one turn has to fulfil both conditions. `text` is
    literal, in upper or lower case. `check` is the name of an audit check that has cases.

    Example: Filter(turn="first", verdict="wrong", text="\\boxed")
    """

    model_config = ConfigDict(frozen=True)

    text: str = Field(default="", max_length=1000, title="Text")
    verdict: Literal["", VerdictName, "unscored", "disagree"] = Field(default="", title="Verdict")
    turn: str = Field(default="any", pattern=r"^(any|first|last|[1-9]\d{0,8})$", title="Turn")  # or its number
    status: Literal["", Status] = Field(default="", title="Status")
    problem: str = Field(default="", title="Problem id")
    least: FiniteFloat | None = Field(default=None, title="Reward from")
    most: FiniteFloat | None = Field(default=None, title="Reward up to")
    calls: Literal["", "some", "none", CallStatus] = Field(default="", title="Calls of tools")
    data_set: str = Field(default="", title="Data set, or a part")
    check: str = Field(default="", title="Found by the check")

    def chosen(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults, by name."""
        return self.model_dump(exclude_defaults=True)

    def address(self, **more: str | int) -> str:
        """Return the query of an address with this filter and the parameters `more`."""
        return urlencode({**self.chosen(), **more})


LABELS = {"unscored": "no score", "disagree": "score and environment differ"}
"""Labels of those values of a filter that are not shown as they are."""


def parse(given: Mapping[str, str]) -> tuple[Filter, dict[str, str]]:
    """Return the filter in an address; if any parameter is wrong, an empty one, and the error of each wrong one."""
    try:
        return Filter.model_validate({name: text for name, text in given.items() if text.strip()}), {}
    except ValidationError as error:
        return Filter(), {str(each["loc"][0]): each["msg"] for each in error.errors()}


_ON_TRAJECTORY = {
    "text": "row in (from rows_with_text(?))",
    "status": "status = ?",
    "problem": "trim(problem_id) = trim(?)",
    "data_set": "data_set in (select data_set from data_sets where contains(lower(version), lower(?)))",
    "check": "row in (from rows_with_case(?))",
}
"""SQL conditions on a row of `listing`, by parameter."""
_OF_CALLS = {"some": "calls > 0", "none": "calls = 0"}
_OF_TURN = {"any": "true", "first": "turn = 0", "last": '"last"'}
_OF_VERDICT = {"unscored": "verdict is null", "disagree": "verdict <> environment_verdict and verdict <> 'none'"}
"""Conditions on a row of `listing` (calls) or of `turns`, by value of a parameter."""


def _where(wanted: Filter) -> tuple[str, list[Any]]:
    """Return the filter as a condition on the table `listing`, and its parameters."""
    whole = {sql: getattr(wanted, name) for name, sql in _ON_TRAJECTORY.items() if getattr(wanted, name)}
    if wanted.calls:
        whole[_OF_CALLS.get(wanted.calls, "row in (select row from calls where status = ?)")] = wanted.calls
    turn = dict[str, Any]()
    if wanted.verdict:
        turn[_OF_VERDICT.get(wanted.verdict, "coalesce(verdict, environment_verdict) = ?")] = wanted.verdict
    for sign, bound in ((">=", wanted.least), ("<=", wanted.most)):
        if bound is not None:
            turn[f"coalesce(scored_reward, reward) {sign} ?"] = bound
    if turn:
        turn[_OF_TURN.get(wanted.turn, "turn = ?::integer - 1")] = wanted.turn
    of_turn = [f"row in (select row from turns where {' and '.join(turn)})"] if turn else []
    values = [value for sql, value in [*whole.items(), *turn.items()] if "?" in sql]
    return " and ".join(["true", *whole, *of_turn]), values


ListItem = dict[str, Any]
"""A line of the list: a row of `list_items` in `listing.sql`."""


def address(item: ListItem, wanted: Filter | None = None, **more: str | int) -> str:
    """Return the query of an address for a trajectory and the list in which it was found.

    The id stays valid after a restart; the row tells trajectories with the same id apart.
    """
    chosen = wanted.chosen() if wanted else {}
    return urlencode({"id": item["trajectory_id"], "row": item["row"], **chosen, **more})


class Library:
    """The lists and trajectories of one database; creates its tables `listing` and `prompts`.

    Args:
        database: the tables of the data sets.
        cases: Parquet file with an audit's cases; None without an audit.
    """

    def __init__(self, database: AuditDatabase, cases: Path | None = None) -> None:
        self.database = database
        database.connection.execute(_TABLES.read_text(encoding="utf-8"))
        if cases:
            columns = "check_name, unit, id, data_set, detail"
            database.all(f"insert into cases select {columns} from read_parquet(?)", glob.escape(str(cases)))
        self._files = dict(database.all("select file, filename from trajectories_files"))
        self.checks = [name for (name,) in database.all("select distinct check_name from cases order by 1")]
        self.find = lru_cache(_CACHED_LISTS)(self._find)

    def _find(self, wanted: Filter) -> RowNumbers:
        """Return the row numbers of all trajectories that match `wanted`, in the order of the list."""
        condition, parameters = _where(wanted)
        return self._rows(condition, *parameters)

    def entries(self, rows: Sequence[int]) -> list[ListItem]:
        """Return the lines of the list for `rows`, in the same order."""
        query = "from list_items where list_contains(?, row) order by list_position(?, row)"
        return self.database.records(query, list(rows), list(rows))

    def rows_with_id(self, trajectory_id: str) -> list[int]:
        """Return the row numbers of the trajectories with this id: normally one, but none or several are possible."""
        return list(self._rows("trajectory_id = ?", trajectory_id).tolist())

    def group(self, data_set: str, problem_id: str) -> list[int]:
        """Return the row numbers of a group's episodes, by sample."""
        in_set = "data_set in (select data_set from data_sets where version = ?)"
        return list(self._rows(f"{in_set} and problem_id = ?", data_set, problem_id).tolist())

    def _rows(self, condition: str, *parameters: Any) -> RowNumbers:
        return self.database.integers(f"select row from listing where {condition} order by position", *parameters)

    def trajectories(self, rows: Sequence[int]) -> list[Trajectory]:
        """Read whole trajectories with their tokens, in the order of `rows`.

        Raises:
            StorageError, OSError, ArrowException: a file is missing or damaged since the reader started.
        """
        found: dict[int, Trajectory] = {}
        for file in dict.fromkeys(row >> 32 for row in rows):
            of_file, path = [row for row in rows if row >> 32 == file], Path(self._files[file])
            with pq.ParquetFile(path, page_checksum_verification=True) as opened:
                check_schema(opened.schema_arrow, path)
                chosen = opened.read().take([row & 0xFFFFFFFF for row in of_file]).to_pylist()
            found |= zip(of_file, map(to_trajectory, chosen), strict=True)
        return [found[row] for row in rows]
