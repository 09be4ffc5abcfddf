"""Reads who holds the lease of a run, from its newest entry, the holder's process and its signs of life."""

import logging
import os
from typing import Any

from storage import layout
from storage.errors import DamagedError
from storage.logs.entries import check_sign
from storage.logs.log import Log
from storage.objects.seal import unseal
from storage.objects.store import Store
from storage.processes import identity

logger = logging.getLogger(__name__)

OWN: set[str] = set()
"""Ids of the leases that this process holds or waits for.

A lease of this process that is not among them counts as free, even if its release could not be written.
"""


def is_held(store: Store, run: str) -> str | None:
    """Describe the holder of the lease of `run`, as far as one look shows; None if the lease is free."""
    last = newest(store, run)
    if last is None or is_alive(last[1]) is False:
        return None
    return None if sign(store, run, last[0]).get("released") else describe(last[1])


def newest(store: Store, run: str) -> tuple[int, dict[str, Any]] | None:
    """Return token and entry of the newest holder. If the entry is damaged, its token counts; its holder is unknown."""
    log = Log(store, layout.lease(run))
    try:
        return log.last()
    except DamagedError as error:
        token = log.length() - 1
        holder = {"machine": "", "host": "?", "pid": "?"}
        ttl_s = sign(store, run, token).get("ttl_s")  # None if there is no sign of life either
        return token, {"holder": holder, "label": f"an unknown process ({error})", "at": "?", "ttl_s": ttl_s}


def is_alive(entry: dict[str, Any]) -> bool | None:
    """Return whether the holder still holds the lease; None if that cannot be seen from this machine."""
    alive, lease = identity.is_alive(entry["holder"]), entry["holder"].get("lease")
    if alive and entry["holder"]["pid"] == os.getpid() and lease:
        return lease in OWN
    return alive


def sign(store: Store, run: str, token: int) -> dict[str, Any]:
    """Return the holder's last sign of life; empty if there is none, or if it cannot be read."""
    key = layout.beat(run, token)
    try:
        return check_sign(unseal(store.read(key), store.uri(key)), store.uri(key))
    except FileNotFoundError:
        return {}
    except DamagedError as error:
        logger.warning("%s", error)
        return {}


def describe(entry: dict[str, Any]) -> str:
    """Describe a holder for messages."""
    holder, label = entry["holder"], entry["label"]
    return f"{label or 'a process'} (process {holder['pid']} on {holder['host']}) since {entry['at']}"
