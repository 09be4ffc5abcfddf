"""One writer for each run: a lease with a fencing token.

The leases of a run are a numbered log; the number of an entry is its fencing token. The holder of the newest entry
writes signs of life to a separate object, and a release when it is done. A lease is free when its holder has released
it, is seen to be dead (on the same machine), or gave no sign of life for `ttl_s` seconds, its own or the waiting
writer's, whichever is longer, on the waiting writer's clock: no two clocks are compared. To take a lease over is to
create the next number; one of several writers succeeds.

The token goes into every manifest. A holder that lost its lease finds the next number before its next commit and stops.
S3 cannot make a create depend on another object. So a holder that pauses between this check and its commit may still
commit. The version then comes from it or from its successor, never from both; its parents are committed, and later
versions build on it.

`is_held` finds who holds a lease without taking it, `tenures` who held it and when.

What is written without the lease of a run, such as an evaluation by another flow, needs none: the first commit wins.
Earlier programs gave each such attempt a lease of its own.
"""

import logging
import os
import socket
import threading
import time
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from storage import layout
from storage.errors import ConflictError, DamagedError, LeaseHeldError, StorageError
from storage.logs.log import Log
from storage.objects.seal import seal, unseal
from storage.objects.store import Store, in_parallel
from storage.telemetry.metrics import LEASE_RENEWED

logger = logging.getLogger(__name__)

TTL_S = 60.0
"""A lease may be taken over after so many seconds without a sign of life, or its holder's own number if larger."""
LONGEST_TTL_S = 3600.0
"""A holder's own number counts up to this, whatever its entry says."""
BEATS = 4
"""Signs of life within this time."""


@dataclass
class Lease:
    """The right to write `run`: a context manager that takes the lease and releases it.

    Args:
        store: the store of the run.
        run: the name of the run.
        ttl_s: see `TTL_S`.
        when_held: if another process holds the lease, wait for its end or stop with LeaseHeldError.
        label: names the holder in messages to other writers (a flow run's id).
    """

    store: Store
    run: str
    ttl_s: float = field(default_factory=lambda: TTL_S)
    when_held: Literal["stop", "wait"] = "stop"
    label: str = ""
    token: int = field(default=-1, init=False)
    _lost: str = field(default="", init=False)
    _done: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def __enter__(self) -> "Lease":
        self._acquire()
        around = copy_context().run  # with the context in which Prefect knows where logs go
        self._thread = threading.Thread(
            target=around, args=[self._stay_alive], name=f"lease of {self.run}", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        assert self._thread
        self._thread.join(self.ttl_s)
        if self._lost:
            return
        try:
            if self._thread.is_alive():  # it may still be writing a sign of life, which would undo the release
                raise StorageError("the store does not answer")
            self._beat(released=True)
        except (StorageError, OSError) as error:  # must not replace the exception that left the block
            logger.warning("the lease of run %s could not be released, it will expire: %s", self.run, error)
        LEASE_RENEWED.remove(self.run)

    def check(self) -> None:
        """Raise ConflictError unless this is still the newest holder."""
        if lost := self._find_successor():
            raise ConflictError(lost)

    @property
    def _log(self) -> Log:
        return Log(self.store, layout.lease(self.run))

    def _acquire(self) -> None:
        """Take the lease as soon as it is free. Raises LeaseHeldError."""
        while True:
            token, entry = _newest(self.store, self.run)
            free = self._wait_until_free(token, entry) if entry else _RELEASED
            own = {"holder": own_identity(), "label": self.label, "at": _now(), "ttl_s": self.ttl_s}
            if self._log.put(token + 1, own):
                if entry and free != _RELEASED:
                    logger.warning("run %s: taken over from %s (%s)", self.run, describe(entry), free)
                self.token = token + 1
                LEASE_RENEWED.labels(self.run).set_to_current_time()
                return

    def _wait_until_free(self, token: int, entry: dict[str, Any]) -> str:
        """Wait for the end of a holder's lease, or for a successor; return why the lease is free.

        Raises:
            LeaseHeldError: the holder is alive, and the caller does not want to wait.
        """
        first = seen = _last_sign(self.store, self.run, token)
        since, is_named = time.monotonic(), False
        limit_s = max(self.ttl_s, _own_ttl_s(entry))
        while self._log.length() == token + 1:
            sign = _last_sign(self.store, self.run, token)
            if ended := _ending(entry, sign):
                return ended
            if sign != seen:
                seen, since = sign, time.monotonic()
            if time.monotonic() - since > limit_s:
                return f"no sign of life for {limit_s:g} s"
            if self.when_held == "stop" and (seen != first or is_alive(entry["holder"])):
                raise LeaseHeldError(
                    f"run {self.run!r} is being written by {describe(entry)}. Wait for it with "
                    "run.when_held=wait, end it, or begin another run with run.name=…"
                )
            if not is_named:
                doing = "waiting for its end" if self.when_held == "wait" else "checking whether it is alive"
                logger.warning("run %s is written by %s; %s", self.run, describe(entry), doing)
                is_named = True
            time.sleep(min(1.0, self.ttl_s / BEATS / 2))
        return "it has a successor"

    def _beat(self, *, released: bool = False) -> None:
        self.store.write(layout.beat(self.run, self.token), seal({"at": _now(), "released": released}))
        LEASE_RENEWED.labels(self.run).set_to_current_time()

    def _stay_alive(self) -> None:
        """Write signs of life and look for a successor until the lease is left; the body of the thread."""
        while not self._done.wait(self.ttl_s / BEATS):
            try:
                self._beat()
                if lost := self._find_successor():
                    logger.error("%s", lost)
                    return
            except Exception as error:  # noqa: BLE001  # the thread must go on to try the next sign of life
                logger.warning("run %s: a sign of life was not written: %r", self.run, error)

    def _find_successor(self) -> str:
        """Say who has taken over the lease; an empty text: nobody."""
        if not self._lost and self._log.length() > self.token + 1:
            _, newest = _newest(self.store, self.run)
            self._lost = (
                f"run {self.run!r} was taken over by {describe(newest)}, because this flow run seemed dead. "
                "This flow run stops; what it has committed stays"
            )
        return self._lost


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def is_held(store: Store, run: str) -> str | None:
    """Describe the holder of the lease of `run`, as far as can be seen at once; None if the lease is free."""
    token, entry = _newest(store, run)
    return describe(entry) if entry and not _ending(entry, _last_sign(store, run, token)) else None


@dataclass(frozen=True, slots=True)
class Tenure:
    """The time for which one holder had a lease, by its own clock.

    Example: Tenure("flow run amber-slug (process 71 on gpu-1) since …", "flow run amber-slug", begun, seen, "")
    """

    holder: str
    label: str
    begun: datetime
    seen: datetime  # last sign of life
    ended: str  # why the lease is free, as far as can be seen at once; empty: it seems to be held

    @property
    def seconds(self) -> float:
        return max(0.0, (self.seen - self.begun).total_seconds())


def tenures(store: Store, run: str) -> list[Tenure]:
    """List who held the lease of `run`, the newest last; damaged entries, which `verify` reports, are left out."""
    log = Log(store, layout.lease(run))
    length = log.length()

    def read(token: int) -> Tenure | None:
        try:
            entry, sign = log.read(token), _last_sign(store, run, token)
            begun, seen = (datetime.fromisoformat(each) for each in (entry["at"], sign.get("at", entry["at"])))
        except (DamagedError, ValueError, TypeError):
            return None
        ended = _RELEASED if token + 1 < length else _ending(entry, sign)
        if not ended and (silent_s := (datetime.now(UTC) - seen).total_seconds()) > max(TTL_S, _own_ttl_s(entry)):
            ended = f"no sign of life for {silent_s:.0f} s"
        return Tenure(describe(entry), entry["label"], begun, seen, ended)

    return [tenure for tenure in in_parallel(read, range(length)) if tenure]


_RELEASED = "it was released"


def _own_ttl_s(entry: dict[str, Any]) -> float:
    return min(LONGEST_TTL_S, float(entry.get("ttl_s") or 0))


def _ending(entry: dict[str, Any], sign: dict[str, Any]) -> str:
    """Return why a holder's lease is free, as far as can be seen at once; an empty text: it seems to be held."""
    if sign.get("released"):
        return _RELEASED
    return "its process has ended" if is_alive(entry["holder"]) is False else ""


def _newest(store: Store, run: str) -> tuple[int, dict[str, Any]]:
    """Return token and entry of the newest holder: -1 and {} without one.

    If the entry is damaged, its token counts, and its holder is unknown.
    """
    log = Log(store, layout.lease(run))
    try:
        return log.last() or (-1, {})
    except DamagedError as error:
        holder = {"machine": "", "host": "?", "pid": "?"}
        return log.length() - 1, {"holder": holder, "label": f"an unknown process ({error})", "at": "?"}


def _last_sign(store: Store, run: str, token: int) -> dict[str, Any]:
    """Return the holder's last sign of life; empty if there is none, or if it cannot be read."""
    key = layout.beat(run, token)
    try:
        return unseal(store.read(key), store.uri(key))
    except (FileNotFoundError, DamagedError):
        return {}


def describe(entry: dict[str, Any]) -> str:
    """Describe a holder for messages."""
    holder, label = entry["holder"], entry["label"]
    return f"{label or 'a process'} (process {holder['pid']} on {holder['host']}) since {entry['at']}"


def own_identity() -> dict[str, Any]:
    """Return the identity of this process. It is unique even after reboots, in containers, and for reused pids."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "machine": _machine(), "pid": pid, "started": _started(pid)}


def is_alive(identity: dict[str, Any]) -> bool | None:
    """Return whether that process is alive; None if this process cannot know (another machine or container)."""
    if identity["machine"] != _machine():
        return None
    started = _started(identity["pid"])
    if started is None:
        try:
            os.kill(identity["pid"], 0)
        except PermissionError:  # a living process of another user, which /proc does not show
            return None
        except ProcessLookupError:
            return False
    return bool(started == identity["started"])


def _machine() -> str:
    """Return ids of this boot of this machine and of the pid namespace."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> int | None:
    """Return the clock ticks from boot to the start of a process; None if it has ended or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
