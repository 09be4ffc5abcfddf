"""One writer for each run: a lease with a fencing token.

The leases of a run are a numbered log; the number of an entry is its fencing token. The holder of the newest entry
writes signs of life to a separate object, and a release when it is done. A lease is free when its holder has released
it, is seen to be dead (on the same machine), or gave no sign of life for `ttl_s` seconds on the waiting writer's own
clock: no two clocks are compared. To take a lease over is to create the next number; one of several writers succeeds.

The token goes into every manifest. A holder that lost its lease finds the next number before its next commit and stops.
S3 cannot make a create depend on another object. So a holder that pauses between this check and its commit may still
commit. The version then comes from it or from its successor, never from both; its parents are committed, and later
versions build on it.

Writers use a lease by the protocol `Fence`. `is_held` looks who holds one without taking it.
"""

import logging
import os
import threading
import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal, Protocol, runtime_checkable

from storage import layout
from storage.errors import DamagedError, LeaseHeldError, LeaseLostError, StorageError
from storage.logs.log import Log
from storage.objects.seal import seal, unseal
from storage.objects.store import Store
from storage.processes import identity
from storage.processes.identity import own_identity

logger = logging.getLogger(__name__)

BEATS = 4
"""Signs of life within `ttl_s`."""


OWN: set[str] = set()
"""Ids of the leases that this process holds or waits for.

A lease of this process that is not among them counts as free, even if its release could not be written.
"""


@runtime_checkable
class Fence(Protocol):
    """The right to write a run (`Lease`)."""

    token: int

    def check(self) -> None:
        """Raise StorageError if another writer has taken over the lease."""


@dataclass
class Lease:
    """The right to write `run`: a context manager that takes the lease and releases it.

    Args:
        store: the store of the run.
        run: the name of the run.
        ttl_s: another writer may take over the lease after so many seconds without a sign of life.
        when_held: if another process holds the lease, wait for its end or stop with LeaseHeldError.
        label: names the holder in messages to other writers (a flow run's id).
    """

    store: Store
    run: str
    ttl_s: float = 60.0
    when_held: Literal["stop", "wait"] = "stop"
    label: str = ""
    token: int = field(default=-1, init=False)
    _id: str = field(default_factory=lambda: uuid.uuid4().hex, init=False)
    _lost: str = field(default="", init=False)
    _done: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _beat_store: Store = field(init=False)
    """The store for signs of life. It retries for `ttl_s` only, because a later sign of life is useless."""

    def __enter__(self) -> "Lease":
        self._beat_store = self.store.with_patience(self.ttl_s)
        OWN.add(self._id)
        self._acquire()
        self._thread = threading.Thread(target=self._stay_alive, name=f"lease of {self.run}", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self._done.set()
        OWN.discard(self._id)
        assert self._thread
        self._thread.join(self.ttl_s)
        if self._thread.is_alive():  # the thread may still be writing a sign of life, which would undo the release
            logger.warning("the lease of run %s is not released, it will expire: the store does not answer", self.run)
            return
        if self._lost:
            return
        try:
            self._beat(released=True)
        except (StorageError, OSError) as error:  # must not replace the exception that left the block
            logger.warning("the lease of run %s could not be released, it will expire: %s", self.run, error)

    def check(self) -> None:
        """Raise LeaseLostError unless this is still the newest holder."""
        if not self._lost and self._log.length() > self.token + 1:
            self._lose()
        if self._lost:
            raise LeaseLostError(self._lost)

    @property
    def _log(self) -> Log:
        return Log(self.store, layout.lease(self.run))

    def _acquire(self) -> None:
        holder = own_identity() | {"lease": self._id}
        watched: _Watched | None = None
        while True:
            newest = newest_holder(self.store, self.run)
            if newest and (watched is None or watched.token != newest[0]):
                watched = _Watched(*newest, last_sign(self.store, self.run, newest[0]))
            if watched is None or (free := self._why_free(watched)):
                number = newest[0] + 1 if newest else 0
                # the second length: if an entry was deleted by hand, its gap looks like the end of the log
                entry = {"holder": holder, "label": self.label, "at": _now(), "ttl_s": self.ttl_s}
                if self._log.put(number, entry) and self._log.length() == number + 1:
                    if watched and free != "released":
                        logger.warning("run %s: taken over from %s (%s)", self.run, describe(watched.entry), free)
                    self.token = number
                    return
                continue
            if self.when_held == "stop" and (watched.moved or is_alive(watched.entry)):
                raise LeaseHeldError(
                    f"run {self.run!r} is being written by {describe(watched.entry)}. Wait for it with "
                    "run.when_held=wait, end it, or begin another run with run.name=…"
                )
            if not watched.is_named:
                doing = "waiting for its end" if self.when_held == "wait" else "checking whether it is alive"
                logger.warning("run %s is written by %s; %s", self.run, describe(watched.entry), doing)
                watched.is_named = True
            time.sleep(min(1.0, self.ttl_s / BEATS / 2))

    def _why_free(self, watched: "_Watched") -> str:
        """Return why the lease may be taken over; empty if it may not."""
        sign = last_sign(self.store, self.run, watched.token)
        if sign.get("released"):
            return "released"
        if is_alive(watched.entry) is False:
            return "its process has ended, or no longer holds the lease"
        if sign != watched.sign:
            watched.sign, watched.since, watched.moved = sign, time.monotonic(), True
        ttl = float(watched.entry["ttl_s"] or self.ttl_s)
        return f"no sign of life for {ttl:g} s" if time.monotonic() - watched.since > ttl else ""

    def _beat(self, *, released: bool = False) -> None:
        sign = {"at": _now(), "released": released, "ttl_s": self.ttl_s}
        self._beat_store.write(layout.beat(self.run, self.token), seal(sign))

    def _stay_alive(self) -> None:
        """Write signs of life and look for a successor, until the lease is left; the body of the thread."""
        while not self._done.wait(self.ttl_s / BEATS):
            try:
                self._beat()
                if self._log.length() > self.token + 1:
                    self._lose()
                    logger.error("%s", self._lost)
                    return
            except Exception as error:  # noqa: BLE001  # the thread must go on to try the next sign of life
                logger.warning("run %s: a sign of life was not written: %r", self.run, error)

    def _lose(self) -> None:
        newest = newest_holder(self.store, self.run)
        assert newest
        self._lost = (
            f"run {self.run!r} was taken over by {describe(newest[1])}, because this flow run seemed dead. "
            "This flow run stops; what it has committed stays"
        )


@dataclass
class _Watched:
    """The holder that a waiting writer watches, and its last sign of life."""

    token: int
    entry: dict[str, Any]
    sign: dict[str, Any]
    since: float = field(default_factory=lambda: time.monotonic())  # when this sign was first seen
    moved: bool = False  # whether the sign has changed since the wait began
    is_named: bool = False  # whether the log says who it is


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def is_held(store: Store, run: str) -> str | None:
    """Describe the holder of the lease of `run`, as far as one look shows; None if the lease is free."""
    last = newest_holder(store, run)
    if last is None or is_alive(last[1]) is False:
        return None
    return None if last_sign(store, run, last[0]).get("released") else describe(last[1])


def newest_holder(store: Store, run: str) -> tuple[int, dict[str, Any]] | None:
    """Return token and entry of the newest holder. If the entry is damaged, its token counts; its holder is unknown."""
    log = Log(store, layout.lease(run))
    try:
        return log.last()
    except DamagedError as error:
        holder = {"machine": "", "host": "?", "pid": "?"}
        entry = {"holder": holder, "label": f"an unknown process ({error})", "at": "?", "ttl_s": None}
        return log.length() - 1, entry


def is_alive(entry: dict[str, Any]) -> bool | None:
    """Return whether the holder still holds the lease; None if that cannot be seen from this machine."""
    alive, lease = identity.is_alive(entry["holder"]), entry["holder"].get("lease")
    if alive and entry["holder"]["pid"] == os.getpid() and lease:
        return lease in OWN
    return alive


def last_sign(store: Store, run: str, token: int) -> dict[str, Any]:
    """Return the holder's last sign of life; empty if there is none, or if it cannot be read."""
    key = layout.beat(run, token)
    try:
        return unseal(store.read(key), store.uri(key))
    except FileNotFoundError:
        return {}
    except DamagedError as error:
        logger.warning("%s", error)
        return {}


def describe(entry: dict[str, Any]) -> str:
    """Describe a holder for messages."""
    holder, label = entry["holder"], entry["label"]
    return f"{label or 'a process'} (process {holder['pid']} on {holder['host']}) since {entry['at']}"
