"""Makes the store's logs whole again, as far as what stands in the store tells what they have lost."""

import uuid
from collections.abc import Callable
from typing import Any

from storage import layout
from storage.errors import DamagedError
from storage.logs import catalog
from storage.logs.entries import LOST
from storage.logs.log import Log
from storage.maintenance.check_logs import check_logs
from storage.objects.seal import seal
from storage.objects.store import Store


def repair(store: Store, tell: Callable[[str], None] = lambda _: None) -> tuple[list[str], list[str]]:
    """Make the logs whole: of the catalog every entry, of the others those that are missing before others.

    Returns:
        Keys of the entries that were put where one was lost; versions and aliases that the catalog did not have.
    """
    found = check_logs(store)
    log, absent, filled = Log(store, layout.CATALOG), list(found.absent), []
    for number in found.lost:
        if _fill(store, log, number, absent[0] if absent else catalog.values("", LOST, [], "")):
            del absent[:1]
            filled.append(log.key(number))
    for values in absent:
        log.append(values)
    for (prefix, number), values in found.gaps.items():
        if _fill(store, Log(store, prefix), number, values):
            filled.append(Log(store, prefix).key(number))
    entered = [values["version"] for values in found.absent]
    for line in (*(f"filled {key}" for key in filled), *(f"entered {name}" for name in entered)):
        tell(line)
    return filled, entered


def _fill(store: Store, log: Log, number: int, values: dict[str, Any]) -> bool:
    """Put an entry where there is none that can be read; False where another was faster."""
    data = seal({**values, "nonce": uuid.uuid4().hex})
    if store.create(log.key(number), data):
        return True
    try:
        log.read(number)
    except DamagedError:
        store.write(log.key(number), data)
        return True
    return False
