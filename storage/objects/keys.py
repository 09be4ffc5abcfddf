"""Names of objects: relative paths below the root of a store."""

from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator

from storage.errors import DamagedError


def check_key(key: str) -> str:
    """`key`, if it stays inside of a root.

    Raises:
        StorageError: it is empty, absolute, climbs, or holds what no object of ours is called.
    """
    parts = PurePosixPath(key).parts
    if not parts or key.startswith("/") or ".." in parts or "\\" in key or not key.isprintable():
        raise DamagedError(f"object key {key!r} is empty, absolute, unprintable or climbs out of the root")
    return key


Key = Annotated[str, AfterValidator(check_key)]
"""A key in a record: it stays inside of the root, whoever wrote it."""
