"""What happens in a folder of 4 MB that is also PREFECT_HOME: `python -m tests.support.full_disk FOLDER`."""

import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from safetensors.numpy import save_file

from configs import load
from flows.run.workspace import telling_full_disks
from storage import layout
from storage.errors import StorageError
from storage.logs.leases import Lease
from storage.maintenance import gc
from storage.maintenance.verify import check_logs, verify
from storage.objects.store import Store
from storage.versions.drafts import Draft, Provenance


def main(folder: Path) -> None:
    """Write until it is full, in every way that a run writes; raise AssertionError if anything else is told."""
    overrides = [f"storage.root={folder}/var", f"storage.cache={folder}/cache", "storage.keep=null"]
    config, version = load("smoke", [*overrides, "run.iterations=2"]), layout.checkpoint("smoke", 0)
    store = Store.of(config.storage)

    def add(draft: Draft, megabytes: float) -> None:
        path = folder / "weights"
        path.write_bytes(bytes(int(megabytes * 1e6)))
        draft.add(path, "model/weights")
        path.unlink()

    with Draft(store, version, "run") as draft:
        add(draft, 0.25)
        draft.commit(Provenance(config={}), [])

    def store_weights() -> None:
        with Draft(store, layout.checkpoint("smoke", 1), "checkpoint") as draft:
            add(draft, 0.5)
            add(draft, 2)

    def save_weights() -> None:
        with TemporaryDirectory(dir=folder) as scratch:  # as the trainer does
            save_file({"weight": np.zeros(10**6)}, f"{scratch}/weights")

    def fill_database() -> None:
        with closing(sqlite3.connect(folder / "logs.sqlite")) as database:
            database.execute("create table logs (text)")
            database.executemany("insert into logs values (?)", [("x" * 1000,)] * 8000)

    ways: dict[str, Callable[[], None]] = {
        f"OSError: [Errno 28] No space left on device: '{folder}/weights' -> '{store.path('runs')}": store_weights,
        "No space left on device": save_weights,
        "database or disk is full": fill_database,
    }
    for said, way in ways.items():
        with pytest.raises(StorageError, match="^a disk is full: ") as told, telling_full_disks(config.storage):
            way()
        for part in (said, "storage.keep.last", f"--root {store.root} gc --delete"):
            assert part in str(told.value), str(told.value)
        assert "\n" not in str(told.value)
        for path in [*folder.glob("weights"), *folder.glob("logs.sqlite*")]:
            path.unlink()
    assert [item.path for item in store.walk() if item.path.endswith((".tmp", ".part"))] == []
    attempt = [item.path for plan in gc.collect(store, gc.Rules(older_than_s=-1)) for item in plan.leftovers]
    assert [path.rpartition("/")[2] for path in attempt] == ["weights"]  # the first file of the attempt that failed
    (finding,) = verify(store, [version]).findings
    assert "says that" in finding.problem  # a `run` where checkpoints are, of which everything else is right
    collect_without_a_byte(store, folder)


def collect_without_a_byte(store: Store, folder: Path) -> None:
    """gc frees what it would otherwise free, though neither its lease nor a tombstone has room."""
    versions = [layout.checkpoint("old", number) for number in range(3)]
    for version in versions:
        with Draft(store, version, "checkpoint") as draft:
            (draft.scratch / "weights").write_bytes(bytes(100_000))
            draft.add(draft.scratch / "weights", "model/weights")
            draft.commit(Provenance(config={}), [])
    with Lease(store, "old", label="gc"):
        pass
    fill = folder / "everything"
    with suppress(OSError), fill.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    assert shutil.disk_usage(folder).free == 0
    gc.collect(store, gc.Rules(keep_last=1, older_than_s=0))
    assert [store.exists(layout.tombstone(version)) for version in versions] == [False, True, False]
    assert shutil.disk_usage(folder).free >= 100_000
    fill.unlink()
    assert [finding for finding in check_logs(store).findings if finding.version != layout.CATALOG] == []


if __name__ == "__main__":
    main(Path(sys.argv[1]))
