"""The log of a retraining: an entry when a night begins, when its training is done, and when it ends.

The log is also the watermark: the newest night names a problem set with all problems that had come by then. No clock is
involved. A night that has begun and not ended was killed, or still runs.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from storage import layout
from storage.errors import ConflictError, DamagedError
from storage.logs import leases, log
from storage.objects.seal import newer
from storage.objects.store import Store, in_parallel
from storage.version_names import DecisionVersion, PolicyVersion, ProblemsVersion

Ending = Literal["promoted", "rejected", "overtaken", "given up"]
"""overtaken: another writer moved the champion meanwhile. given up: by hand, see `flows.retrain --give-up`."""


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Night(_Entry):
    """The entry of a night that began.

    Example: Night(number=3, run="nightly-0003", champion="runs/nightly-0002/checkpoints/000030", move=2, …)
    """

    number: int  # from 1
    run: str
    champion: PolicyVersion | None  # the policy it continues from; None: no champion yet, version 0 of `run` becomes it
    move: int | None  # newest move of the champion's alias at that time
    problems: ProblemsVersion  # what it trains on: new, waiting and replayed problems
    fresh: ProblemsVersion  # of these, the new ones and those of earlier nights that were rejected without harm
    accepted: ProblemsVersion | None  # problems that champions were trained on
    seen: ProblemsVersion  # all problems that had come by then: the watermark
    counts: dict[str, int]  # numbers of problems: new, waiting, replayed, dropped
    sets: dict[str, ProblemsVersion]  # evaluation sets by name
    config: dict[str, Any]  # configuration of `run`
    at: str


class Trained(_Entry):
    """The entry of a night whose training is done."""

    number: int
    challenger: PolicyVersion


class End(_Entry):
    """The entry of a night that ended, with its outcome."""

    number: int
    outcome: Ending
    challenger: PolicyVersion | None
    decision: DecisionVersion | None
    move: int | None  # newest move of the champion's alias afterwards
    accepted: ProblemsVersion | None  # as in `Night`, for the next one
    waiting: ProblemsVersion | None  # problems to be tried again
    at: str


class Retry(_Entry):
    """An entry made by hand after the newest night: problems of an earlier night wait again."""

    waiting: ProblemsVersion
    at: str


class _Event(_Entry):
    """An entry as it is stored: one of the records above."""

    began: Night | None = None
    trained: Trained | None = None
    ended: End | None = None
    retried: Retry | None = None
    nonce: str


@dataclass(slots=True)
class Record:
    """All entries of one night so far."""

    night: Night
    challenger: PolicyVersion | None = None
    end: End | None = None
    retried: list[ProblemsVersion] = field(default_factory=list)  # problems made to wait again by hand after its end


class Nights:
    """The log of the nights of the retraining `name`.

    Call `read` before writing. An entry is appended after the last one that was read, and is refused if another writer
    has appended meanwhile.

    Args:
        store: the store of the log.
        name: the name of the retraining.
        fence: the lease of the writer, checked before each entry.
    """

    def __init__(self, store: Store, name: str, fence: leases.Lease | None = None) -> None:
        self._log, self._name, self._fence = log.Log(store, layout.retraining(name)), name, fence
        self._next = 0

    def read(self) -> list[Record]:
        """Read all nights, oldest first.

        Raises:
            StorageError: an entry is missing or damaged.
        """
        self._next = self._log.length()
        try:
            return _records(map(_Event.model_validate, in_parallel(self._log.read, range(self._next))))
        except (FileNotFoundError, KeyError, IndexError, ValidationError) as error:
            unknown = newer(error)
            found = f"{unknown}, which this code does not know: upgrade" if unknown else f"lost an entry: {error!r}"
            raise DamagedError(f"the log of retraining {self._name!r} has {found}") from error

    def begin(self, night: Night) -> None:
        """Append an entry, as the methods below do. All raise ConflictError if another writer was faster."""
        self._append("began", night)

    def trained(self, number: int, challenger: PolicyVersion) -> None:
        self._append("trained", Trained(number=number, challenger=challenger))

    def end(self, end: End) -> None:
        self._append("ended", end)

    def retry(self, waiting: ProblemsVersion) -> None:
        self._append("retried", Retry(waiting=waiting, at=now()))

    def _append(self, event: str, entry: _Entry) -> None:
        if self._fence:
            self._fence.check()
        if not self._log.put(self._next, {event: entry.model_dump(mode="json")}):
            raise ConflictError(f"retraining {self._name!r} is being written by another process: this flow run stops")
        self._next += 1


def _records(events: Iterable[_Event]) -> list[Record]:
    """Group entries by night. Raises IndexError or KeyError if they contradict."""
    records: list[Record] = []
    for event in events:
        if event.began:
            records.append(Record(event.began))
        record = records[-1]
        if event.trained:
            record.challenger = event.trained.challenger
        if event.ended:
            record.end = event.ended
        if event.retried:
            record.retried.append(event.retried.waiting)
        entries: tuple[Night | Trained | End | None, ...] = (event.began, event.trained, event.ended)
        for entry in entries:
            if entry and entry.number != len(records):
                raise KeyError(f"night {len(records)} is followed by an entry of night {entry.number}")
    return records


def now() -> str:
    """Return the time for people to read; nothing depends on it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
