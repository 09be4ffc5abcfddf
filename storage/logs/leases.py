"""One writer for each run: a lease with a fencing token.

Leases of a run are a numbered log; the number is the fencing token. The holder of the newest entry writes signs of
life beside it, and says so when he is done. A lease is free when its holder has released it, is seen to be dead (on
the same machine), or has given no sign of life for `ttl_s` by the watch of who waits: no two clocks are compared.
Taking it over is creating the next number, which one of several succeeds in.

The token goes into every manifest. A holder who was taken over finds the next number before each commit and stops.
S3 cannot make a create depend on another object, so one who slept between that look and his commit may still commit:
the version is then his or his successor's, never both, its parents are committed, and its successors build on it.
"""

import logging
import threading
import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

from storage import layout
from storage.errors import LeaseHeldError, LeaseLostError, StorageError
from storage.logs import holders
from storage.logs.log import Log
from storage.objects.seal import seal
from storage.objects.store import Store
from storage.processes import own_identity

logger = logging.getLogger(__name__)

BEATS = 4
"""Signs of life within `ttl_s`."""


@dataclass
class Lease:
    """The right to write `run`; a context manager that gives it back.

    Args:
        store: where the run lies.
        run: its name.
        ttl_s: after so long without a sign of life others may take it over.
        when_held: wait for another holder, or stop with LeaseHeldError.
        label: who this is, for others to read (a flow run's id).
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
    _brisk: Store = field(init=False)
    """For signs of life, which come too late after `ttl_s`."""

    def __enter__(self) -> "Lease":
        self._brisk = self.store.with_patience(self.ttl_s)
        holders.OWN.add(self._id)
        self._acquire()
        self._thread = threading.Thread(target=self._stay_alive, name=f"lease of {self.run}", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self._done.set()
        holders.OWN.discard(self._id)
        assert self._thread
        self._thread.join(self.ttl_s)
        if self._thread.is_alive():  # a sign of life that is still on its way would undo the release
            logger.warning("the lease of run %s is not given back, it will run out: the store is silent", self.run)
            return
        if self._lost:
            return
        try:
            self._beat(released=True)
        except (StorageError, OSError) as error:  # must not hide why the block was left
            logger.warning("the lease of run %s could not be given back, it will run out: %s", self.run, error)

    def check(self) -> None:
        """Raises LeaseLostError unless this is still the newest holder."""
        if not self._lost and self._log.length() > self.token + 1:
            self._lose()
        if self._lost:
            raise LeaseLostError(self._lost)

    @property
    def _log(self) -> Log:
        return Log(self.store, layout.lease(self.run))

    def _acquire(self) -> None:
        watched: _Watched | None = None
        while True:
            newest = holders.newest(self.store, self.run)
            if newest is None or (free := self._why_free(*newest, watched)):
                number = newest[0] + 1 if newest else 0
                # where somebody has deleted an entry, that gap looks like the end
                if self._log.put(number, self._entry()) and self._log.length() == number + 1:
                    if newest and free != "released":
                        logger.warning("run %s: taken over from %s (%s)", self.run, holders.name(newest[1]), free)
                    self.token = number
                    return
                continue
            if watched is None or watched.token != newest[0]:
                watched = _Watched(newest[0], holders.sign(self.store, self.run, newest[0]), time.monotonic())
                logger.warning(
                    "run %s is written by %s; %s", self.run, holders.name(newest[1]), self._intention(newest[1])
                )
            self._stop_if_alive(*newest, watched)
            time.sleep(min(1.0, self.ttl_s / BEATS / 2))

    def _entry(self) -> dict[str, Any]:
        holder = own_identity() | {"lease": self._id}
        return {"holder": holder, "label": self.label, "at": _now(), "ttl_s": self.ttl_s}

    def _why_free(self, token: int, entry: dict[str, Any], watched: "_Watched | None") -> str:
        """Why the lease may be taken over; empty where it may not."""
        sign = holders.sign(self.store, self.run, token)
        if sign.get("released"):
            return "released"
        if holders.lives(entry) is False:
            return "its process has ended, or holds it no more"
        if watched and watched.token == token:
            if sign != watched.sign:
                watched.sign, watched.since = sign, time.monotonic()
                watched.moved = True
            ttl = float(entry["ttl_s"] or self.ttl_s)
            if time.monotonic() - watched.since > ttl:
                return f"no sign of life for {ttl:g} s"
        return ""

    def _stop_if_alive(self, token: int, entry: dict[str, Any], watched: "_Watched") -> None:
        if self.when_held == "stop" and (watched.moved or holders.lives(entry)):
            raise LeaseHeldError(
                f"run {self.run!r} is being written by {holders.name(entry)}. Wait for it with run.when_held=wait, end "
                "it, or begin another run with run.name=…"
            )

    def _intention(self, entry: dict[str, Any]) -> str:
        if self.when_held == "wait":
            return "waiting for its end"
        return "looking whether it lives" if holders.lives(entry) is None else "stopping"

    def _beat(self, *, released: bool = False) -> None:
        sign = {"at": _now(), "released": released, "ttl_s": self.ttl_s}
        self._brisk.write(layout.beat(self.run, self.token), seal(sign))

    def _stay_alive(self) -> None:
        """The thread: signs of life, and a look for a successor."""
        while not self._done.wait(self.ttl_s / BEATS):
            try:
                self._beat()
                if self._log.length() > self.token + 1:
                    self._lose()
                    logger.error("%s", self._lost)
                    return
            except Exception as error:  # noqa: BLE001  # whatever it is, the next sign of life is tried
                logger.warning("run %s: a sign of life was not written: %r", self.run, error)

    def _lose(self) -> None:
        newest = holders.newest(self.store, self.run)
        assert newest
        self._lost = (
            f"run {self.run!r} was taken over by {holders.name(newest[1])}: this flow run was thought dead, and stops. "
            "What it has committed stands"
        )


@dataclass
class _Watched:
    """What a waiting writer has seen of the holder."""

    token: int
    sign: dict[str, Any]
    since: float
    moved: bool = False


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
