"""Room on the disks: what a run deletes by itself, and what a full disk means."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from configs import load
from configs.storage import Storage
from flows.run.workspace import open_leased, telling_full_disks
from storage import layout
from storage.versions.drafts import Draft
from tests.support.paths import ROOT


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(KeyError, match="^'x'$"), telling_full_disks(Storage()):
        raise KeyError("x")


@pytest.mark.slow
def test_a_full_disk_is_told_in_one_sentence(tmp_path: Path) -> None:
    """A real one: the file, and what frees room. What was stored stays whole."""
    isolated = ["unshare", "--map-root-user", "--mount"]
    program = f"PREFECT_HOME={tmp_path} exec {sys.executable} -m tests.support.full_disk {tmp_path}"
    mount = f"mount -t tmpfs -o size=4m none {tmp_path} && {program}"
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
