"""Load a source of the configuration as a problem set."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice

from configs.problems import ArithmeticSource, FileSource, HubSource, Source, StoredSource
from tasks.problems import arithmetic, files, hub
from tasks.problems.lines import LONGEST_MB
from tasks.problems.presets import COLUMNS, PRESETS, columns_of, from_fields
from tasks.problems.problem_set import ProblemError, ProblemSet, Row, RowError, RowPlace, collect


def load_problems(source: Source, max_bad_share: float) -> ProblemSet:
    """Load the problems of `source`, in its order. Its `count` limits the rows read from all files, including bad rows.

    >>> load_problems(ArithmeticSource(kind="arithmetic", count=1), 0.0).problems[0].prompt
    'What is 11 + 19?'

    Raises:
        ValueError: `source` is a stored set, which needs a store to read it.
        ProblemError: the source cannot be read, holds no usable problem or too few, or a larger share of its rows than
            `max_bad_share` (0 to 1) is bad.
    """
    if isinstance(source, ArithmeticSource):
        return ProblemSet(arithmetic.generate(source), bad=[])
    if isinstance(source, StoredSource):
        raise ValueError(f"{source.version}: a stored set is read from the store, not loaded")
    name, found = source.name if isinstance(source, HubSource) else source.path, Counter[str]()
    to_problem = PRESETS[source.preset] if source.preset else from_fields(source.fields, found)
    loaded = collect(islice(_rows(source), source.count), to_problem, name, max_bad_share)
    kept = columns_of({"metadata": source.fields.get("metadata", [])})
    if absent := [column for column in kept if not found[column]]:
        raise ProblemError(f"{name}: no row has the column {absent[0]!r}, which fields.metadata names: check its name")
    return loaded


def _rows(source: FileSource | HubSource) -> Iterator[tuple[RowPlace, Row | RowError]]:
    if isinstance(source, HubSource):
        return ((RowPlace(line), row) for line, row in hub.read(source.name, source.subset, source.split))
    matched, longest = files.find(source.path), LONGEST_MB * 2**20

    def read(path: str) -> Iterator[tuple[int, Row | RowError]]:
        if source.kind == "jsonl":
            return files.read_jsonl(path, longest)
        columns = COLUMNS[source.preset] if source.preset else columns_of(source.fields)
        return files.read_parquet(path, longest, columns)

    return ((RowPlace(line, name), row) for name, path in matched for line, row in read(path))
