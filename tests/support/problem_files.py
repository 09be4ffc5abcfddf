"""Files of problems, and what is read of them."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from configs.problems import Fields, FileSource
from tasks.problems import ProblemSet, load_problems

FIELDS: Fields = {"prompt": "ask", "solutions": "gold"}
NAMED: Fields = {"id": "key", **FIELDS}


def write_rows(path: Path, *rows: Any) -> Path:
    """Write a file: Parquet if its name says so, else JSONL; in that, texts and bytes are lines as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        texts = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
        path.write_bytes(b"".join((text.encode() if isinstance(text, str) else text) + b"\n" for text in texts))
    return path


def load_file(path: Path | str, max_bad_share: float = 0.99, **knobs: Any) -> ProblemSet:
    """Read a file, by default JSONL with the columns of `FIELDS`."""
    columns = {} if "preset" in knobs else {"fields": FIELDS}
    source = FileSource.model_validate({"kind": "jsonl", "path": str(path), **columns, **knobs})
    return load_problems(source, max_bad_share)
