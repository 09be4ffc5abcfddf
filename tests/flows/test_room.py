"""Room on the disks: what the next checkpoint needs, and what a full disk means."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from configs import load
from flows.run.configuration import plan
from flows.run.room import computed_bytes, disks, telling_full_disks
from flows.run.workspace import open_leased
from storage import layout
from storage.versions.drafts import Draft
from tests.support.paths import ROOT


def test_two_folders_on_one_disk_share_its_room(tmp_path: Path) -> None:
    """A checkpoint is there twice while it is stored. A bucket has no end, but the cache has a copy."""
    local = load("smoke", [f"storage.root={tmp_path}/var", f"storage.cache={tmp_path}/not/yet/there"])
    (both,) = disks(local, 300)
    assert (both.folder, both.next) == (f"{tmp_path}/not/yet/there", 600)
    assert both.free == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)
    remote = local.model_copy(update={"storage": local.storage.model_copy(update={"root": "s3://bucket/x"})})
    (cache,) = disks(remote, computed_bytes(remote, 100))
    assert cache.next == 300  # of weights and two moments
    assert "the next checkpoint of this run needs 300 bytes" in str(cache)


def test_the_plan_says_it() -> None:
    """A checkpoint of Qwen2.5-7B has 30 GB of weights and 61 GB of moments; it is written twice on one disk."""
    assert "disk: ./var/cache has " in plan(load("gsm8k-7b"))
    assert "the next checkpoint of this run needs 182.8 GB" in plan(load("gsm8k-7b"))


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(KeyError, match="^'x'$"), telling_full_disks(load("smoke")):
        raise KeyError("x")


@pytest.mark.slow
def test_a_full_disk_is_told_in_one_sentence(tmp_path: Path) -> None:
    """A real one: the folder, the bytes that are needed, and what frees them. What was stored stays whole."""
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
