"""Repairs the store's logs: replaces lost entries, as far as the store still shows what they held."""

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


def repair(store: Store, progress: Callable[[str], None] = lambda _: None) -> tuple[list[str], list[str]]:
    """Replace every lost entry of the catalog, and entries of the other logs that are missing before later ones.

    Returns:
        The keys of the replaced entries; and the versions and aliases that were added to the catalog.
    """
    report = check_logs(store)
    log, absent, filled = Log(store, layout.CATALOG), list(report.absent), []
    for number in report.lost:
        if _fill(store, log, number, absent[0] if absent else catalog.values("", LOST, [], "")):
            del absent[:1]
            filled.append(log.key(number))
    for values in absent:
        log.append(values)
    for (prefix, number), values in report.gaps.items():
        if _fill(store, Log(store, prefix), number, values):
            filled.append(Log(store, prefix).key(number))
    entered = [values["version"] for values in report.absent]
    for line in (*(f"filled {key}" for key in filled), *(f"entered {name}" for name in entered)):
        progress(line)
    return filled, entered


def _fill(store: Store, log: Log, number: int, values: dict[str, Any]) -> bool:
    """Put an entry where it is missing or damaged; return False if another writer was faster."""
    data = seal({**values, "nonce": uuid.uuid4().hex})
    if store.create(log.key(number), data):
        return True
    try:
        log.read(number)
    except DamagedError:
        store.write(log.key(number), data)
        return True
    return False
