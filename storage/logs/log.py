"""A numbered log of objects that are created once and never changed: 00000000.json, 00000001.json …

Numbers have no gaps, so the end is found by probing, never by listing. A writer reads the log up to a free number and
then appends at it. If this succeeds, no other entry came between: compare-and-swap made from put-if-absent alone.

A digest shows that an entry is as it was written, not that this pipeline wrote it. So every read of an entry checks its
fields as well. Additional fields are allowed, because a newer program may have added them. `storage.logs.nights` and
`storage.versions.drafts` check their own entries.
"""

import uuid
from collections.abc import Callable
from typing import Any

from storage import errors, layout
from storage.objects.seal import seal, unseal
from storage.objects.store import Store

LOST = "lost"
"""Kind of a placeholder in the catalog, which `repair` puts where an entry was lost."""
ALIAS = "alias"
"""Kind of an entry by which earlier programs found an alias; its version is the alias's name."""
_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    layout.CATALOG: {"kind": str, "version": str, "parents": list},
    layout.alias(""): {"version": str, "sha256": str, "reason": str, "by": str, "at": str},
    layout.lease(""): {"holder": dict, "label": str, "at": str, "ttl_s": (int, float)},
}
"""The types of an entry's fields, by the beginning of its log's prefix."""


class Log:
    """The log under `prefix`. The store remembers its last known length, from which the next search starts."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def length(self, at_least: int = 0) -> int:
        """Return the number of entries; the caller knows of `at_least` so many.

        Takes one request if no entry is new, else about 1.5 log2(new entries).
        """
        known = max(at_least, self._store.positions.get(self._prefix, 0))
        length = first_free(lambda number: self._store.exists(self.key(number)), known)
        self._remember(length)
        return length

    def read(self, number: int) -> dict[str, Any]:
        """Return an entry. Raises FileNotFoundError if it does not exist, DamagedError if it is damaged."""
        where = self.uri(number)
        return check_entry(self._prefix, unseal(self._store.read(self.key(number)), where), where)

    def last(self) -> tuple[int, dict[str, Any]] | None:
        """Return number and values of the newest entry; None if the log is empty."""
        length = self.length()
        return (length - 1, self.read(length - 1)) if length else None

    def put(self, number: int, values: dict[str, Any]) -> bool:
        """Append as entry `number`, which must be the next; return False if another writer was faster."""
        created = self._store.create(self.key(number), seal({**values, "nonce": uuid.uuid4().hex}))
        self._remember(number + 1)
        return created

    def append(self, values: dict[str, Any]) -> int:
        """Append at the end, wherever it is; return the number."""
        while not self.put(number := self.length(), values):
            pass
        return number

    def _remember(self, length: int) -> None:
        positions = self._store.positions
        positions[self._prefix] = max(positions.get(self._prefix, 0), length)

    def key(self, number: int) -> str:
        return f"{self._prefix}/{number:08d}.json"

    def uri(self, number: int) -> str:
        return self._store.uri(self.key(number))


def first_free(has: Callable[[int], bool], known: int = 0) -> int:
    """Return the first number from `known` on for which `has` is false; `has` must be true for all before it."""
    low, step = known, 1
    while has(low + step - 1):
        low, step = low + step, step * 4
    high = low + step - 1  # known to be free
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if has(middle) else (low, middle)
    return low


def check_entry(log: str, values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return `values`, an entry of the log with the prefix `log`, if its fields are right.

    Raises:
        DamagedError: the fields are not those of an entry of this log; the message names `where`.
    """
    for prefix, fields in _FIELDS.items():
        wrong = [name for name, type_ in fields.items() if not isinstance(values.get(name), type_)]
        if log.startswith(prefix) and wrong:
            raise errors.DamagedError(f"{where} has wrong fields ({', '.join(wrong)}): it is damaged")
    return values
