"""A lease allows one writer for each run: it is taken, kept, released and taken over from a dead holder."""

import os
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from storage import layout
from storage.errors import ConflictError, LeaseHeldError, StorageError
from storage.logs import leases
from storage.logs.leases import Lease, own_identity
from storage.logs.log import Log
from storage.objects.seal import seal
from storage.objects.store import Store
from storage.versions.drafts import Draft, Provenance
from storage.versions.manifests import committed

pytestmark = pytest.mark.slow

TTL_S = 2.0


def test_the_second_writer_stops_and_names_the_holder(any_store: Store) -> None:
    """The error names the label and the process of the holder. After its release the run is free."""
    named = rf"flow run happy-hare \(process {os.getpid()} on .*run.when_held=wait"
    with Lease(any_store, "r", label="flow run happy-hare") as held:
        assert held.token == 0
        assert "happy-hare" in (leases.is_held(any_store, "r") or "")
        with pytest.raises(LeaseHeldError, match=named), Lease(Store(any_store.root), "r"):
            pass
    assert leases.is_held(any_store, "r") is None
    with Lease(any_store, "r") as after:
        assert after.token == 1


def test_the_second_writer_waits_if_asked(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """With `when_held="wait"` the second writer takes the lease after the holder has released it."""
    taken = []

    def second() -> None:
        with Lease(Store(store.root), "r", ttl_s=600, when_held="wait") as lease:
            taken.append((lease.token, time.monotonic()))

    with Lease(store, "r", ttl_s=600):
        thread = threading.Thread(target=second)
        thread.start()
        while "waiting for its end" not in caplog.text:
            assert thread.is_alive()
            time.sleep(0.01)
        time.sleep(0.2)
        assert taken == []
        released = time.monotonic()
    thread.join(timeout=600)
    assert taken[0][0] == 1
    assert taken[0][1] >= released


def hold(store: Store, ttl_s: float, **identity: Any) -> None:
    """Write the lease entry of a process, which is this one but for what is given."""
    entry = {"holder": own_identity() | identity, "label": "", "at": "2026", "ttl_s": ttl_s}
    Log(store, layout.lease("r")).put(0, entry)


@pytest.mark.parametrize("identity", [{"started": 1}, {"pid": 2**22 + 1}])
def test_a_dead_holder_is_replaced_at_once(identity: dict[str, int], store: Store) -> None:
    """A holder on the same machine that is gone, or whose pid is another process's by now, has no time to live."""
    hold(store, ttl_s=600, **identity)
    started = time.monotonic()
    with Lease(store, "r") as lease:
        assert lease.token == 1
    assert time.monotonic() - started < 60


FAR = {"machine": "another", "host": "far"}
"""The identity of a process on another machine: only its signs of life can show that it lives."""


@pytest.mark.parametrize("entry", [None, b"{"], ids=["whole entry", "damaged entry"])
@pytest.mark.parametrize("sign", [None, b"{"], ids=["no sign", "damaged sign"])
def test_a_silent_holder_elsewhere_is_replaced(sign: bytes | None, entry: bytes | None, store: Store) -> None:
    """The time to live is measured on the clock of the waiting writer, whose own replaces one that is unknown."""
    hold(store, ttl_s=0.5, **FAR)
    if entry:
        store.write(layout.lease("r") + "/00000000.json", entry)
    if sign:
        store.write(layout.beat("r", 0), sign)
    started = time.monotonic()
    with Lease(store, "r", ttl_s=0.5) as lease:
        assert lease.token == 1
    assert time.monotonic() - started >= 0.5


@pytest.mark.parametrize(("ttl_s", "longest_s"), [(1.5, 3600), (1e18, 1.5), (float("inf"), 1.5), (float("nan"), 1.5)])
def test_the_holders_own_time_to_live_counts(
    ttl_s: float, longest_s: float, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiting writer with a shorter one does not take over a holder between two signs; nobody waits for ever."""
    monkeypatch.setattr(leases, "LONGEST_TTL_S", longest_s)
    hold(store, ttl_s, **FAR)
    started = time.monotonic()
    with Lease(store, "r", ttl_s=0.5) as lease:
        assert lease.token == 1
    assert time.monotonic() - started >= 1.5


@pytest.mark.parametrize(("ttl_s", "seems_over"), [(600, False), (1, True)])
def test_a_holder_is_listed_by_its_own_time_to_live(ttl_s: float, seems_over: bool, store: Store) -> None:
    """A hundred seconds of silence are no end of a holder that allows itself ten minutes."""
    begun = (datetime.now(UTC) - timedelta(seconds=100)).isoformat()
    entry = {"holder": own_identity() | FAR, "label": "", "at": begun, "ttl_s": ttl_s}
    Log(store, layout.lease("r")).put(0, entry)
    assert [bool(each.ended) for each in leases.tenures(store, "r")] == [seems_over]


def test_a_living_holder_elsewhere_is_respected(store: Store) -> None:
    """A second writer stops as soon as it sees a new sign of life, long before the time to live is over."""
    hold(store, ttl_s=600, **FAR)
    done = threading.Event()

    def live() -> None:
        beats = 0
        while not done.wait(0.2):
            beats += 1
            store.write(layout.beat("r", 0), seal({"at": str(beats), "released": False}))

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(LeaseHeldError, match="on far"), Lease(store, "r", ttl_s=600):
            pass
    finally:
        done.set()
        thread.join()


def test_a_holder_that_was_taken_over_cannot_commit(any_store: Store) -> None:
    """A holder that slept finds the fencing token of its successor before the commit, and commits nothing."""
    with Lease(any_store, "r", label="sleeper", ttl_s=600) as sleeper:
        successor = {"holder": own_identity(), "label": "flow run new-newt", "at": "later", "ttl_s": 600}
        assert Log(Store(any_store.root), layout.lease("r")).put(1, successor)
        taken_over = pytest.raises(ConflictError, match="taken over by flow run new-newt")
        with taken_over, Draft(any_store, "runs/r/scores/000000/a", "scores") as draft:
            draft.commit(Provenance(config={}, fence=sleeper), [])
    assert not committed(any_store, draft.version)
    assert leases.is_held(any_store, "r")  # the old holder has not released its successor's lease


def test_a_missed_sign_of_life_does_not_lose_the_lease(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder keeps the lease while the store fails for a moment, and writes signs of life again afterwards."""
    write, failing, failed, written = Store.write, threading.Event(), threading.Semaphore(0), threading.Event()

    def broken(self: Store, key: str, data: bytes) -> None:
        if failing.is_set():
            failed.release()
            raise RuntimeError("expired token")
        write(self, key, data)
        written.set()

    monkeypatch.setattr(Store, "write", broken)
    with Lease(store, "r", ttl_s=TTL_S) as lease:
        failing.set()
        assert all(failed.acquire(timeout=600) for _ in range(2))
        lease.check()
        written.clear()
        failing.clear()
        assert written.wait(600)
        assert leases.is_held(store, "r")
    assert leases.is_held(store, "r") is None


def test_a_lease_that_could_not_be_released(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store fails when the flow ends. This hides no other error; the lease is held until this process ends."""

    def fail(*_: object) -> None:
        raise OSError("away")

    with monkeypatch.context() as patch, Lease(store, "r"):
        patch.setattr(Store, "write", fail)
    assert leases.is_held(store, "r")


def test_a_lost_race_stops_the_flow(store: Store) -> None:
    """If two writers commit one version in spite of the lease, the second one stops: its weights are not stored."""
    with Lease(store, "r") as lease:
        provenance = Provenance(config={}, fence=lease)
        with Draft(store, "runs/r/scores/000000/a", "scores") as draft:
            assert draft.commit(provenance, []).fence == 0
        lost = pytest.raises(StorageError, match="committed by another writer")
        with lost, Draft(store, "runs/r/scores/000000/a", "scores") as draft:
            draft.commit(provenance, [])
