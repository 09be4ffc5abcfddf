"""Checks of the contents of a data object whose size and hash are right. Each problem is a sentence about the file."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage import errors, records
from storage.versions.checkpoints import Canary
from storage.versions.datasets import read_parquet, schema_version

_KINDS = {
    "problems": (records.PROBLEM_SCHEMA, ("problem_id",)),
    "trajectories": (records.TRAJECTORY_SCHEMA, ("trajectory_id",)),
    "evaluation": (records.TRAJECTORY_SCHEMA, ("trajectory_id",)),
    "annotations": (records.ANNOTATION_SCHEMA, ("trajectory_id", "turn")),
    "scores": (records.SCORE_SCHEMA, ("trajectory_id", "turn")),
    "curriculum": (records.CURRICULUM_SCHEMA, ("problem_id",)),
    "audit": (records.CASE_SCHEMA, ("number",)),
    "exclusions": (records.EXCLUSION_SCHEMA, ("trajectory_id", "data_set", "problem_key")),
}
"""The schema of the Parquet files of each kind of version, and the columns that no two of its rows have in common."""
SCHEMAS = {kind: schema for kind, (schema, _) in _KINDS.items()}
_SINCE_SCHEMA_1 = {
    column.name for column in fields(records.Trajectory) if (column.default, column.default_factory) != 2 * (MISSING,)
}
_NEW = {"trajectories": _SINCE_SCHEMA_1, "evaluation": _SINCE_SCHEMA_1, "scores": {"reward", "parts"}}
"""Columns that files of an older schema may lack, by kind: of trajectories those with a default."""
_PER_TOKEN = ("token_ids", "action_mask", "logprobs", "versions")


def parquet(path: Path, kind: str, rows: int | None) -> list[str]:
    """Return problems of footer, schema and number of rows, without reading the rows."""
    try:
        with pq.ParquetFile(path) as file:
            row_count, found = file.metadata.num_rows, file.schema_arrow
        written = schema_version(found)
    except (pa.ArrowException, OSError, ValueError) as error:
        return [f"cannot be read as Parquet: {error}"]
    if written > records.SCHEMA_VERSION:
        return [f"was written with schema_version {written}; this code knows {records.SCHEMA_VERSION}: upgrade"]
    optional = _NEW.get(kind, set[str]()) if written < records.SCHEMA_VERSION else set[str]()
    problems = _schema_problems(found, SCHEMAS[kind], optional)
    if row_count != rows:
        problems.append(f"has {row_count} rows, its manifest says {rows}")
    return problems


def _schema_problems(found: pa.Schema, expected: pa.Schema, optional: set[str]) -> list[str]:
    common = [name for name in expected.names if name in found.names]
    differing = [found.field(name) for name in common if not found.field(name).equals(expected.field(name))]
    kinds = {
        "lacks the columns": [name for name in expected.names if name not in {*found.names, *optional}],
        "has unknown columns": [name for name in found.names if name not in expected.names],
        "has columns of other types": [f"{it.name} {it.type}{' or null' * it.nullable}" for it in differing],
    }
    return [f"{problem} {', '.join(names)}" for problem, names in kinds.items() if names]


class RowChecker:
    """A reader that checks all rows of one version, file by file. Only the ids of rows stay in memory."""

    def __init__(self, kind: str) -> None:
        self._schema, self._key = _KINDS[kind]
        self._seen = set[tuple[Any, ...]]()

    def problems(self, path: Path) -> list[str]:
        """Check the pages and rows of one file: rows may contradict neither themselves nor earlier rows."""
        faults: dict[str, list[int]] = defaultdict(list)
        damage = []
        try:
            for number, row in enumerate(read_parquet(path)):
                for fault in self._faults(row):
                    faults[fault].append(number)
        except (ValueError, TypeError, KeyError) as error:
            damage = [f"its rows cannot be read: {error}"]
        return [f"{fault} (rows {errors.first_few(numbers)})" for fault, numbers in faults.items()] + damage

    def _faults(self, row: dict[str, Any]) -> Iterator[str]:
        key = tuple(row[name] for name in self._key)
        if key in self._seen:
            yield f"{' and '.join(self._key)} of a row are those of another row"
        self._seen.add(key)
        if self._schema is not records.TRAJECTORY_SCHEMA:
            return
        length, starts = len(row["token_ids"]), row.get("sequence_starts", [0])
        if any(len(row[name]) != length for name in _PER_TOKEN):
            yield f"{', '.join(_PER_TOKEN)} of a row differ in length"
        if not all(0 <= turn["start"] <= turn["end"] <= length for turn in row["turns"]):
            yield "turns lie outside of their row's tokens"
        if starts[:1] != [0] or starts != sorted(starts) or starts[-1] > length:
            yield "sequences do not begin with the tokens of their row, are not in order, or lie outside of its tokens"


def safetensors(path: Path) -> list[str]:
    """Return problems of the header, which must describe every byte of the file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            return []
    except (SafetensorError, OSError) as error:
        return [f"cannot be read as safetensors: {error}"]


def canary(path: Path) -> list[str]:
    """Return problems of a `canary.json`."""
    try:
        stored = Canary(**json.loads(path.read_bytes()))
        ids, logprobs = [int(token) for token in stored.token_ids], [float(logp) for logp in stored.logprobs]
    except (ValueError, TypeError) as error:
        return [f"is not a canary: {error}"]
    if not logprobs or len(logprobs) != len(ids) - 1:
        return [f"has {len(logprobs)} logprobs for {len(ids)} tokens"]
    if min(ids) < 0 or not all(map(math.isfinite, logprobs)):
        return ["has tokens below 0, or logprobs that are not finite"]
    return []
