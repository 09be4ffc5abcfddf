"""One writer for each run: taken, kept, given back, taken over from the dead, and fenced."""

import multiprocessing
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from storage import layout
from storage.errors import LeaseHeldError, LeaseLostError, StorageError
from storage.logs import holders
from storage.logs.leases import Lease
from storage.logs.log import Log
from storage.objects.seal import seal
from storage.objects.store import Store
from storage.processes import is_alive, own_identity
from storage.versions.drafts import Draft, Provenance
from storage.versions.manifests import committed

pytestmark = pytest.mark.slow

TTL_S = 2.0


def test_the_second_stops_and_says_who_holds_it(any_store: Store) -> None:
    """Both name and process are told; afterwards the run is free."""
    with Lease(any_store, "r", label="flow run happy-hare") as held:
        assert held.token == 0
        assert "happy-hare" in (holders.is_held(any_store, "r") or "")
        with (
            pytest.raises(
                LeaseHeldError, match=rf"flow run happy-hare \(process {os.getpid()} on .*run.when_held=wait"
            ),
            Lease(Store(any_store.root), "r"),
        ):
            pass
    assert holders.is_held(any_store, "r") is None
    with Lease(any_store, "r") as after:
        assert after.token == 1


def test_the_second_waits_as_asked(any_store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Until the holder is done."""
    got = []

    def second() -> None:
        with Lease(Store(any_store.root), "r", ttl_s=600, when_held="wait") as lease:
            got.append((lease.token, time.monotonic()))

    with Lease(any_store, "r", ttl_s=600):
        thread = threading.Thread(target=second)
        thread.start()
        while "waiting for its end" not in caplog.text:
            assert thread.is_alive()
            time.sleep(0.01)
        time.sleep(0.2)
        assert got == []
        released = time.monotonic()
    thread.join(timeout=600)
    assert got[0][0] == 1
    assert got[0][1] >= released


def test_signs_of_life_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the time to live, which counts from the last one.

    Each sign takes half of that time by the watch of who waits, so that a machine that stands still does no harm.
    """
    root, write, written = f"memory://{tmp_path.name}", Store.write, list[str]()
    taken = threading.Event()

    def beat(self: Store, key: str, data: bytes) -> None:
        write(self, key, data)
        written.append(key)

    monkeypatch.setattr(Store, "write", beat)
    watch = SimpleNamespace(monotonic=lambda: len(written) * TTL_S / 2, sleep=time.sleep)
    monkeypatch.setattr("storage.logs.leases.time", watch)

    def second() -> None:
        with Lease(Store(root), "r", when_held="wait"):
            taken.set()

    thread = threading.Thread(target=second)
    with Lease(Store(root), "r", ttl_s=TTL_S) as held:
        thread.start()
        while len(written) < 6:
            assert not taken.wait(0.1)
        held.check()
    assert taken.wait(600)
    thread.join()


def _hold(root: str, ready: "multiprocessing.synchronize.Event") -> None:
    with Lease(Store(root), "r", ttl_s=600):
        ready.set()
        time.sleep(600)


def test_a_dead_holder_is_replaced_at_once(store: Store) -> None:
    """Killed on the same machine: no need to wait for its time to live."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=_hold, args=(store.root, ready))
    holder.start()
    assert ready.wait(600)
    with pytest.raises(LeaseHeldError, match=f"process {holder.pid}"), Lease(store, "r"):
        pass
    holder.kill()
    holder.join()
    started = time.monotonic()
    with Lease(store, "r") as lease:
        assert lease.token == 1
    assert time.monotonic() - started < 60  # of 600


def elsewhere(store: Store, ttl_s: float) -> None:
    """A lease of a process on a machine of which nothing can be known but its signs of life."""
    holder = own_identity() | {"machine": "another", "host": "far"}
    Log(store, layout.lease("r")).put(0, {"holder": holder, "label": "", "at": "2026", "ttl_s": ttl_s})


def test_a_silent_holder_elsewhere_is_replaced_after_its_time(any_store: Store) -> None:
    """By one's own watch; the clock of the other machine is never read."""
    elsewhere(any_store, ttl_s=1.0)
    started = time.monotonic()
    with Lease(any_store, "r", ttl_s=1.0) as lease:
        assert lease.token == 1
    assert time.monotonic() - started >= 1.0


@pytest.mark.parametrize("sign", [{"ttl_s": "x"}, {"ttl_s": -1}, {"released": "no"}])
def test_a_sign_of_life_with_wrong_fields_is_none(sign: dict[str, Any], store: Store) -> None:
    """Of a holder whose entry is damaged, too: the lease is free after one's own time."""
    elsewhere(store, ttl_s=0.5)
    store.write(layout.lease("r") + "/00000000.json", b"{")
    store.write(layout.beat("r", 0), seal({"at": "2026", "released": False, "ttl_s": 0.5} | sign))
    with Lease(store, "r", ttl_s=0.5) as lease:
        assert lease.token == 1


def test_a_living_holder_elsewhere_is_respected(store: Store) -> None:
    """A sign of life seen: whoever should stop stops, long before the time to live is over."""
    elsewhere(store, ttl_s=600)
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


def test_who_was_taken_over_cannot_commit(any_store: Store) -> None:
    """The fencing token: a holder that slept finds its successor before the commit, and nothing is committed."""
    with Lease(any_store, "r", label="sleeper", ttl_s=600) as sleeper:
        successor = {"holder": own_identity(), "label": "flow run new-newt", "at": "later", "ttl_s": 600}
        assert Log(Store(any_store.root), layout.lease("r")).put(1, successor)
        with (
            Draft(any_store, "runs/r/scores/000000/a", "scores") as draft,
            pytest.raises(LeaseLostError, match="taken over by flow run new-newt"),
        ):
            draft.commit(Provenance(config={}, fence=sleeper), [])
    assert not committed(any_store, draft.version)
    assert holders.is_held(any_store, "r")  # the old holder has not given back what is not his


def test_a_damaged_sign_of_life_is_none(store: Store) -> None:
    """A run is not shut for ever by one bad object."""
    elsewhere(store, ttl_s=0.5)
    store.write(layout.beat("r", 0), b"{")
    with Lease(store, "r") as lease:
        assert lease.token == 1


def test_a_damaged_entry_is_that_of_somebody(store: Store) -> None:
    """Who it was cannot be told, but whether he lives, and how long he may be silent, as his signs of life say."""
    elsewhere(store, ttl_s=600)
    store.write(f"{layout.lease('r')}/00000000.json", b"{")
    store.write(layout.beat("r", 0), seal({"at": "2026", "released": False, "ttl_s": 600.0}))
    found = holders.newest(store, "r")
    assert found
    assert (found[0], found[1]["ttl_s"]) == (0, 600)
    assert "00000000.json does not end with its digest" in (holders.is_held(store, "r") or "")
    store.write(layout.beat("r", 0), seal({"at": "2026", "released": True}))
    assert holders.is_held(store, "r") is None
    with Lease(store, "r") as lease:
        assert lease.token == 1


def test_a_silent_holder_with_a_damaged_entry(store: Store) -> None:
    """Is replaced after the time of who waits, as nothing tells his own."""
    elsewhere(store, ttl_s=600)
    store.write(f"{layout.lease('r')}/00000000.json", b"{")
    started = time.monotonic()
    with Lease(store, "r", ttl_s=1) as lease:
        assert lease.token == 1
    assert time.monotonic() - started >= 1


@pytest.mark.parametrize("lost", range(4))
def test_a_deleted_entry_is_not_the_end(store: Store, lost: int) -> None:
    """Whoever fills the gap does not hold the run by that: the token is beyond all that were given."""
    for _ in range(5):
        with Lease(store, "r"):
            pass
    store.delete(Log(store, layout.lease("r")).key(lost))
    with Lease(Store(store.root), "r") as lease:
        lease.check()
        assert lease.token == 5


def test_a_missed_sign_of_life_is_not_the_end(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is away for a moment: the holder goes on, and what it commits then stands."""
    write, failing, failed, beaten = Store.write, threading.Event(), threading.Semaphore(0), threading.Event()

    def broken(self: Store, key: str, data: bytes) -> None:
        if failing.is_set():
            failed.release()
            raise RuntimeError("expired token")
        write(self, key, data)
        beaten.set()

    monkeypatch.setattr(Store, "write", broken)
    with Lease(store, "r", ttl_s=TTL_S) as lease:
        failing.set()
        assert all(failed.acquire(timeout=600) for _ in range(2))
        lease.check()
        beaten.clear()
        failing.clear()
        assert beaten.wait(600)
        assert holders.is_held(store, "r")
    assert holders.is_held(store, "r") is None


def test_a_lease_that_was_not_given_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store was away when the flow ended: its process, which lives on, knows that it holds nothing any more."""

    def fail(*_: object) -> None:
        raise OSError("away")

    with monkeypatch.context() as patch, Lease(store, "r"):
        patch.setattr(Store, "write", fail)
    assert holders.is_held(store, "r") is None
    with Lease(store, "r") as again:
        assert again.token == 1


def test_a_lost_race_stops_the_flow(store: Store) -> None:
    """Should two commit one version all the same, the second does not go on with weights that are not stored."""
    with Lease(store, "r") as lease:
        provenance = Provenance(config={}, fence=lease)
        for expected in (None, "committed by another writer"):
            with Draft(store, "runs/r/scores/000000/a", "scores") as draft:
                if expected is None:
                    assert draft.commit(provenance, []).fence == 0
                else:
                    with pytest.raises(StorageError, match=expected):
                        draft.commit(provenance, [])


def test_many_takers_of_a_free_lease_take_it_in_turn(any_store: Store) -> None:
    """Six at once: never two at the same time, each with a token of its own."""
    inside, tokens, overlaps = [], [], []

    def take() -> None:
        with Lease(Store(any_store.root), "r", ttl_s=30, when_held="wait") as lease:
            inside.append(lease.token)
            overlaps.append(len(inside))
            time.sleep(0.05)
            inside.remove(lease.token)
            tokens.append(lease.token)

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert sorted(tokens) == list(range(6))
    assert set(overlaps) == {1}


def test_a_process_knows_itself(tmp_path: Path) -> None:
    """Number and start: the same number used again is another process."""
    mine = own_identity()
    assert is_alive(mine)
    assert is_alive(mine | {"started": 1}) is False
    assert is_alive(mine | {"pid": 2**22 + 1}) is False
    assert is_alive(mine | {"machine": "another"}) is None
