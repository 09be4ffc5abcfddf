"""All errors that the storage raises.

    StorageError                 something stored cannot be used, or a request makes no sense
    ├── DamagedError             missing, damaged, collected, of the wrong kind, or written by a newer program
    ├── UnavailableError         the store does not answer, or refuses this user
    └── ConflictError            another writer was faster, or holds the lease
        ├── LeaseHeldError       another flow run holds the run's lease
        └── AliasMovedError      the alias does not point where the caller expected

Code that can continue without one damaged version catches `DamagedError`. No code may catch `UnavailableError` and
continue, because a store that does not answer says nothing about its objects. An absent object raises Python's
FileNotFoundError.
"""

from collections.abc import Sequence


class StorageError(ValueError):
    """Something stored cannot be used, or a request makes no sense; the message names the object and the remedy."""


class DamagedError(StorageError):
    """Something stored is missing, damaged, or not what it should be."""


class UnavailableError(StorageError):
    """The store does not answer, or refuses this user."""


class ConflictError(StorageError):
    """Another writer was faster, or holds the lease."""


class LeaseHeldError(ConflictError):
    """Another flow run holds the run's lease."""


class AliasMovedError(ConflictError):
    """The alias does not point where the caller expected."""


def counted(count: int, noun: str) -> str:
    """Write a number of things, for a message.

    >>> counted(1, "version"), counted(2000, "trajectory")
    ('1 version', '2,000 trajectories')
    """
    several = f"{noun.removesuffix('y')}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else several}"


def first_few(items: Sequence[object], most: int = 3) -> str:
    """Name the first of many things, for a message.

    >>> first_few([3, 5, 7, 9, 11])
    '3, 5, 7 and 2 more'
    """
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return f"{', '.join(map(str, items[:most]))}{more}"
