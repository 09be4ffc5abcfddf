"""What gc does in a full folder of 4 MB: `python -m tests.support.full_disk FOLDER`."""

import shutil
import sys
from contextlib import suppress
from pathlib import Path

from storage import layout
from storage.logs.leases import Lease
from storage.maintenance import gc
from storage.maintenance.verify import check_logs
from storage.objects.store import Store
from storage.versions.drafts import Draft, Provenance


def main(folder: Path) -> None:
    """Fill the folder and collect; raise AssertionError if that frees nothing, or leaves less than it should."""
    store = Store(f"{folder}/var")
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
