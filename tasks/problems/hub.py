"""Read the numbered rows of a Hugging Face data set."""

from collections.abc import Iterator

from tasks.problems.problem_set import ProblemError, Row


def read(name: str, subset: str | None, split: str) -> Iterator[tuple[int, Row]]:
    """Yield the number, from 1, and the content of each row of a data set on the hub or in a local folder.

    Raises:
        ProblemError: the data set cannot be loaded.
    """
    import datasets  # here, because the import takes seconds and only this source needs it

    try:
        data = datasets.load_dataset(name, subset, split=split)
    # The library raises its own errors, and those of its HTTP client and file readers: they have no common base.
    except Exception as error:
        raise ProblemError(
            f"data set {name!r} (subset {subset!r}, split {split!r}) cannot be loaded "
            f"({type(error).__name__}: {error}): "
            "check the three names; without a network, download its files and use kind jsonl or parquet"
        ) from error
    yield from enumerate(data, 1)
