"""Types that a store and its backends (`local`, `s3`) share: keys, and what a listing says of an object.

Keys are the names of objects: relative paths below the root of a store.
"""

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator

from storage.errors import DamagedError


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object that `walk` lists."""

    path: str
    bytes: int
    modified: float  # seconds since the epoch, by the clock of the server or of this host


def check_key(key: str) -> str:
    """Return `key` if it stays inside of the root.

    Raises:
        DamagedError: `key` is empty, absolute, unprintable, holds a backslash, or climbs out of the root with `..`.
    """
    parts = PurePosixPath(key).parts
    if not parts or key.startswith("/") or ".." in parts or "\\" in key or not key.isprintable():
        raise DamagedError(f"object key {key!r} is empty, absolute, unprintable or climbs out of the root")
    return key


Key = Annotated[str, AfterValidator(check_key)]
"""A key in a record. It is checked when the record is read, because the record may come from another program."""
