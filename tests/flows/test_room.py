"""Room on the disks: what a run deletes by itself, and what a full disk means."""

import errno
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from configs import load
from configs.storage import Keep, Storage
from flows.run.workspace import open_leased, telling_full_disks
from storage import layout
from storage.errors import StorageError
from storage.versions.drafts import Draft
from tests.support.paths import ROOT


def test_a_full_disk_is_told_in_one_sentence(tmp_path: Path) -> None:
    """The file, and what frees room for this run. Other errors stay as they are."""
    knobs = Storage(root=f"{tmp_path}/my var", keep=Keep(every=5))
    frees = re.escape(f"--root '{tmp_path}/my var' gc --delete --older-than-hours 0 --keep-every 5")
    told = pytest.raises(StorageError, match=f"^a disk is full: .*'/a'. .*storage.keep.last.*{frees}")
    with told, telling_full_disks(knobs):
        raise OSError(errno.ENOSPC, "No space left on device", "/a")
    with pytest.raises(FileNotFoundError), telling_full_disks(knobs):
        raise FileNotFoundError


@pytest.mark.slow
def test_gc_frees_a_full_disk(tmp_path: Path) -> None:
    """A real one, on which neither its lease nor a tombstone has room."""
    isolated = ["unshare", "--map-root-user", "--mount"]
    mount = f"mount -t tmpfs -o size=4m none {tmp_path} && exec {sys.executable} -m tests.support.full_disk {tmp_path}"
    tried = [*isolated, "mount", "-t", "tmpfs", "none", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(tried, capture_output=True, check=False).returncode:
        pytest.skip("no folder of limited size can be mounted here")
    done = subprocess.run([*isolated, "sh", "-c", mount], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_few_train_states_do_not_keep_all_checkpoints(tmp_path: Path) -> None:
    """While a run works, the checkpoints between two train states go when the second one is there."""
    options = ["train.state_every=15", "storage.keep={last: 2, every: 0}", f"storage.root={tmp_path}/var"]
    with open_leased(load("smoke", [*options, f"storage.cache={tmp_path}/cache"])) as workspace:
        versions = [layout.checkpoint("smoke", number) for number in range(32)]
        for version in versions:
            with Draft(workspace.store, version, "checkpoint") as draft:
                for name in ("model/weights", *(["state/moments"] if version.number % 15 == 0 else [])):
                    (draft.scratch / "file").write_text(f"{version}/{name}")
                    draft.add(draft.scratch / "file", name)
                draft.commit(workspace.provenance(), [])
            workspace.collect(version.number)
        store = workspace.store
        assert [each.number for each in versions if not store.exists(layout.tombstone(each))] == [0, 30, 31]
