"""From a source of the configuration to a problem set."""

from collections.abc import Iterator
from itertools import islice

from configs.schema import ArithmeticSource, FileSource, HubSource, Source, StoredSource
from tasks.problems import arithmetic, files, hub
from tasks.problems.presets import COLUMNS, PRESETS, from_fields
from tasks.problems.problem_set import Place, ProblemSet, Row, RowError, collect


def load_problems(source: Source, max_bad_share: float) -> ProblemSet:
    """The problems of `source`, in its order; its `count` limits the rows read, of all files, bad ones included.

    >>> load_problems(ArithmeticSource(kind="arithmetic", count=1), 0.0).problems[0].prompt
    'What is 11 + 19?'

    Raises:
        ValueError: a stored set: a store is needed to read it.
        ProblemError: the source cannot be read, holds nothing usable or too little, or a larger
            share of its rows than `max_bad_share` (0 to 1) is bad.
    """
    if isinstance(source, ArithmeticSource):
        return ProblemSet(arithmetic.generate(source), bad=[])
    if isinstance(source, StoredSource):
        raise ValueError(f"{source.version}: a stored set is read from the store, not loaded")
    to_problem = PRESETS[source.preset] if source.preset else from_fields(source.fields)
    name = source.name if isinstance(source, HubSource) else source.path
    return collect(islice(_rows(source), source.count), to_problem, name, max_bad_share)


def _rows(source: FileSource | HubSource) -> Iterator[tuple[Place, Row | RowError]]:
    if isinstance(source, HubSource):
        return ((Place(line), row) for line, row in hub.read(source.name, source.subset, source.split))
    found, longest = files.find(source.path), source.max_line_mb * 2**20

    def read(path: str) -> Iterator[tuple[int, Row | RowError]]:
        if source.kind == "jsonl":
            return files.read_jsonl(path, longest)
        columns = COLUMNS[source.preset] if source.preset else list(source.fields.values())
        return files.read_parquet(path, longest, columns)

    return ((Place(line, name), row) for name, path in found for line, row in read(path))
