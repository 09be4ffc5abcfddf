"""Whichever call to the store fails, the same command ends what it began: every point of the commit protocol.

Each scene is a command on a small store. Its calls to the store are counted. Then for each call, and for each way to
fail there, the command is run on a fresh copy of the store, and run again on what is left. In the end there is what a
command leaves that nothing has disturbed, no lease is held, and `verify` and `gc` find neither damage nor loss.
"""

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar, cast

import pytest

from storage import layout
from storage.errors import UnavailableError
from storage.logs import catalog, leases
from storage.logs.leases import Lease, own_identity
from storage.logs.nights import Nights
from storage.maintenance import gc
from storage.maintenance.copying import copy_run
from storage.maintenance.verify import check_logs, repair, verify
from storage.objects.local import ObjectInfo
from storage.objects.store import Store
from storage.records import TRAJECTORY_SCHEMA
from storage.versions import aliases, datasets, manifests
from storage.versions.datasets import ShardWriter
from storage.versions.drafts import Draft, JournaledDraft, Provenance
from tests.storage.test_gc import EVALUATION
from tests.storage.test_nights import CHALLENGER, END, NIGHT
from tests.support.chain_helpers import commit_run, commit_text
from tests.support.train_helpers import make_trajectory

A = TypeVar("A")
Way = Literal["dead before", "dead after", "error before", "error after", "twice"]
WAYS: tuple[Way, ...] = ("dead before", "dead after", "error before", "error after", "twice")
"""`dead`: no call of the writer arrives any more, as after a kill. `error`: this call only. `after`: it has taken
effect, but its answer is lost. `twice`: a client that got no answer has asked again."""

RUN, FIRST, SECOND = layout.run("r"), layout.checkpoint("r", 0), layout.checkpoint("r", 1)
ROLLOUT = layout.trajectories("played", 0)


class Dead(BaseException):
    """The writer is gone: nothing that it does arrives any more."""


class Objects:
    """A backend in memory, which counts calls and fails at one of them; its stores share their objects.

    Args:
        objects: the bytes and the time of each object by its path.
        folder: a folder for what commands write elsewhere.
        fatal: the number of the call that fails; 0: none.
        way: how it fails.
    """

    def __init__(self, objects: dict[str, tuple[bytes, float]], folder: Path, fatal: int = 0, way: Way = "twice"):
        self.objects, self.folder, self._fatal, self._way = objects, folder, fatal, way
        self.calls, self._is_dead, self._lock = 0, False, threading.RLock()

    def size(self, path: str) -> int:
        return self._call(lambda: len(self._find(path)))

    def read(self, path: str) -> bytes:
        return self._call(lambda: self._find(path))

    def write(self, path: str, data: bytes) -> None:
        self._call(lambda: self.objects.update({path: (data, time.time())}))

    def create(self, path: str, data: bytes) -> bool:
        return self._call(lambda: self.objects.setdefault(path, new := (data, time.time())) is new)

    def upload(self, path: str, source: Path) -> None:
        self.write(path, source.read_bytes())

    def download(self, path: str, target: Path) -> str:
        target.write_bytes(content := self.read(path))
        return hashlib.sha256(content).hexdigest()

    def delete(self, path: str) -> None:
        self._call(lambda: self.objects.pop(path, None))

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        found = self._call(lambda: sorted(item for item in self.objects.items() if item[0].startswith(prefix)))
        return (ObjectInfo(path, len(data), modified) for path, (data, modified) in found)

    def uri(self, path: str) -> str:
        return path

    def _find(self, path: str) -> bytes:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path][0]

    def _call(self, call: Callable[[], A]) -> A:
        with self._lock:
            self.calls += 1
            fails = self.calls == self._fatal
            if self._is_dead:
                raise Dead
            self._is_dead = fails and "dead" in self._way
            if not fails:
                return call()
            if "before" not in self._way:
                call()
            if self._way == "twice":
                return call()
            raise Dead if self._is_dead else UnavailableError("no answer")


def opened(backend: Objects, root: str = "/here") -> Store:
    store = Store(root)
    store.backend = cast("Any", backend)
    return store


def beside(store: Store) -> Store:
    """Return another store with the same backend."""
    return opened(cast("Objects", store.backend), "/beside")


def nothing(_: Store) -> None:
    """Prepare an empty store."""


def run_of_two(store: Store) -> None:
    commit_run(store, "r", 2)


def write_run(store: Store) -> None:
    """A flow run: it takes the lease, commits what is missing, and moves its alias."""
    with Lease(store, "r") as lease:
        for version, parents in ((RUN, []), (FIRST, [RUN]), (SECOND, [FIRST])):
            if not manifests.committed(store, version):
                commit_text(store, version, *parents, fence=lease)
        aliases.advance(store, layout.latest("r"), SECOND)


def play(store: Store) -> None:
    """A rollout: it takes over the finished shards, and plays only what they lack."""
    with Lease(store, "played") as lease:
        if manifests.committed(store, ROLLOUT):
            return
        with JournaledDraft(store, ROLLOUT, "trajectories", lease) as draft:
            played = {note["problem_id"] for note in draft.notes}
            with ShardWriter(draft, TRAJECTORY_SCHEMA, rows_per_shard=2) as writer:
                for number in {*range(3)} - played:
                    rows = [make_trajectory(f"{number}/{sample}", [[7, 8]]) for sample in range(2)]
                    writer.write_group(rows, {"problem_id": number})
            draft.commit(Provenance(config={}, fence=lease), [])


def evaluate(store: Store) -> None:
    """What is written without the lease of a run."""
    if not manifests.committed(store, EVALUATION):
        commit_text(store, EVALUATION, FIRST)


def promote(store: Store) -> None:
    newest = aliases.current(store, "champion")
    if not newest or newest.version != SECOND:
        aliases.move(store, "champion", SECOND, newest.number if newest else None, by="ada")


def night(store: Store) -> None:
    with Lease(store, "nightly") as lease:
        nights = Nights(store, "nightly", lease)
        records = nights.read()
        if not records:
            nights.begin(NIGHT)
        if not records or not records[0].challenger:
            nights.trained(1, CHALLENGER)
        if not records or not records[0].end:
            nights.end(END)


def four_checkpoints_and_leftovers(store: Store) -> None:
    versions = commit_run(store, "r", 4)
    aliases.move(store, "champion", versions[1], None)
    with Draft(store, layout.checkpoint("r", 4), "checkpoint") as killed:
        (killed.scratch / "part").write_text("part")
        killed.add(killed.scratch / "part", "part")


def collect(store: Store) -> None:
    gc.collect(store, gc.Rules(keep_last=1, older_than_s=-7200))


def lose_entries(store: Store) -> None:
    commit_run(store, "r", 2)
    for number in (0, 2):
        store.delete(f"{layout.CATALOG}/{number:08d}.json")


def copy(store: Store) -> None:
    """A run goes to another store; either of both may fail."""
    copy_run(store, beside(store), "r")


Scene = tuple[Callable[[Store], None], Callable[[Store], object]]
"""What prepares the store, and the command."""

SCENES: dict[str, Scene] = {
    "run": (nothing, write_run),
    "rollout": (nothing, play),
    "evaluation": (run_of_two, evaluate),
    "alias": (run_of_two, promote),
    "night": (nothing, night),
    "gc": (four_checkpoints_and_leftovers, collect),
    "repair": (lose_entries, repair),
    "copy": (run_of_two, copy),
}
MANY_CALLS = ("run", "gc", "repair", "copy")
"""Scenes that take seconds for each way to fail: `make test-long` plays them, and `make test` one way of most."""


def is_quick(name: str, way: Way) -> bool:
    return name not in MANY_CALLS or (way == "dead after" and name != "copy")


def attempt(command: Callable[[Store], object], backend: Objects, may_fail: bool) -> None:
    """Run the command in a process that has ended afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leases, "own_identity", lambda: own_identity() | {"started": 1})
        try:
            command(opened(backend))
        except (Dead, UnavailableError):
            assert may_fail


def outcome(backend: Objects) -> list[dict[str, Any]]:
    """Return what the stores hold, without what differs from one attempt to the next; fail if anything is wrong."""
    return [_outcome(opened(backend, root), backend.folder) for root in ("/here", "/beside")]


def _outcome(store: Store, folder: Path) -> dict[str, Any]:
    logs = check_logs(store)
    gc.collect(store, gc.Rules(keep_last=99, older_than_s=-7200))
    assert [*logs.findings, *verify(store, logs.versions).findings] == []
    keys = [re.sub(r"/[0-9a-f]{12}/", "/NONCE/", item.path) for item in store.walk()]
    kept = [key for key in keys if not key.startswith(("leases/", "catalog/", "aliases/")) and "/journal/" not in key]
    rows = datasets.trajectories(store, ROLLOUT, folder) if manifests.committed(store, ROLLOUT) else ()
    return {
        "objects": sorted(kept),
        "catalog": {entry.version for entry in catalog.read_all(store)},
        "aliases": {name: [each.version for each in aliases.history(store, name)] for name in aliases.names(store)},
        "parents": {version: manifests.read(store, version).parent_names for version in logs.versions},
        "rows": sorted(row.trajectory_id for row in rows),
        "leases": [run for run in ("r", "played", "nightly") if leases.is_held(store, run)],
        "nights": Nights(store, "nightly").read(),
    }


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=[] if is_quick(name, way) else [pytest.mark.long])
        for name in SCENES
        for way in WAYS
    ],
)
def test_the_same_command_ends_what_a_failed_one_began(
    name: str, way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each call: a failure, the same command again, and the outcome of a command that nothing has disturbed."""
    monkeypatch.setattr(gc, "time", SimpleNamespace(time=lambda: time.time() + 8 * 86400))  # no leftover is too young
    prepare, command = SCENES[name]
    prepare(opened(prepared := Objects({}, tmp_path)))
    undisturbed = Objects(dict(prepared.objects), tmp_path / "undisturbed")
    attempt(command, undisturbed, may_fail=False)
    calls, expected = undisturbed.calls, outcome(undisturbed)
    assert calls >= 6
    for fatal in range(1, calls + 1):
        failing = Objects(dict(prepared.objects), tmp_path / str(fatal), fatal, way)
        attempt(command, failing, may_fail=way != "twice")
        whole = Objects(failing.objects, failing.folder)
        if way != "twice":
            command(opened(whole))
        assert outcome(whole) == expected, f"call {fatal} of {calls}"
