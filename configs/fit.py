"""The knobs of training from stored data sets alone (`python -m flows.fit`)."""

from typing import Annotated

from pydantic import Field, PositiveInt

from configs.knobs import Knobs


class Fit(Knobs):
    data: Annotated[list[str], Field(max_length=100_000)] = []
    """Runs, all of whose data sets are trained on, and versions of trajectories; `--data` sets it. A run keeps the
    versions that there were when it began."""
    scores: Annotated[list[str], Field(max_length=100_000)] = []
    """Versions of scores, at most one for each data set, if they shall not be those of this configuration's scorer. A
    run keeps those that it began with."""
    where: str | None = None
    """SQL condition (DuckDB) on the columns of `episodes` in `tasks/tables/tables.sql`, such as `best > 0.5`: one
    expression without queries, which reaches neither files nor the network; empty: all trajectories."""
    epochs: PositiveInt = 1
    """Number of passes over the data sets."""
    episodes_per_update: PositiveInt = 512
    """Number of trajectories of an update, up to the end of a group."""
