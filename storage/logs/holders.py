"""Who holds the lease of a run, as far as its newest entry, his process and his signs of life tell."""

import logging
import os
from typing import Any

from storage import layout
from storage.errors import DamagedError
from storage.logs.entries import check_sign
from storage.logs.log import Log
from storage.objects.seal import unseal
from storage.objects.store import Store
from storage.processes import is_alive

logger = logging.getLogger(__name__)

OWN: set[str] = set()
"""Leases that this process holds or is after: its own word on those that it could not give back."""


def is_held(store: Store, run: str) -> str | None:
    """Who writes `run` as far as can be seen at one look; None where nobody does."""
    found = newest(store, run)
    if found is None or lives(found[1]) is False:
        return None
    return None if sign(store, run, found[0]).get("released") else name(found[1])


def newest(store: Store, run: str) -> tuple[int, dict[str, Any]] | None:
    """Token and entry of the newest holder. Of a damaged entry the token counts, and its holder is unknown."""
    log = Log(store, layout.lease(run))
    try:
        return log.last()
    except DamagedError as error:
        token = log.length() - 1
        holder = {"machine": "", "host": "?", "pid": "?"}
        ttl_s = sign(store, run, token).get("ttl_s")  # None where there is no sign of life either
        return token, {"holder": holder, "label": f"somebody ({error})", "at": "?", "ttl_s": ttl_s}


def lives(entry: dict[str, Any]) -> bool | None:
    """Whether the holder still holds it, as far as that can be seen from here; None where it cannot."""
    alive, lease = is_alive(entry["holder"]), entry["holder"].get("lease")
    if alive and entry["holder"]["pid"] == os.getpid() and lease:
        return lease in OWN
    return alive


def sign(store: Store, run: str, token: int) -> dict[str, Any]:
    """The holder's last sign of life; one that cannot be read is none."""
    key = layout.beat(run, token)
    try:
        return check_sign(unseal(store.read(key), store.uri(key)), store.uri(key))
    except FileNotFoundError:
        return {}
    except DamagedError as error:
        logger.warning("%s", error)
        return {}


def name(entry: dict[str, Any]) -> str:
    """A holder, for people to read."""
    holder, label = entry["holder"], entry["label"]
    return f"{label or 'a process'} (process {holder['pid']} on {holder['host']}) since {entry['at']}"
