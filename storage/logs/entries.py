"""Checks of the fields that an entry of each kind of log must hold.

A digest shows that an entry is as it was written, not that this pipeline wrote it. So every read of an entry checks its
fields as well. Additional fields are allowed, because a newer program may have added them. `storage.logs.nights` and
`storage.versions.drafts` check their own entries.
"""

from typing import Any

from storage import layout
from storage.errors import DamagedError

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


def check_entry(log: str, values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return `values`, an entry of the log with the prefix `log`, if its fields are right.

    Raises:
        DamagedError: the fields are not those of an entry of this log; the message names `where`.
    """
    for prefix, fields in _FIELDS.items():
        wrong = [name for name, type_ in fields.items() if not isinstance(values.get(name), type_)]
        if log.startswith(prefix) and wrong:
            raise DamagedError(f"{where} has wrong fields ({', '.join(wrong)}): it is damaged")
    return values
