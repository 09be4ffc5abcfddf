"""Room on the disks: what a run will hold, what is compared with it, and what a full disk means."""

import functools
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import load
from configs.storage import Keep
from storage import layout
from storage.versions.drafts import Draft
from tasks.run.configuration import plan
from tasks.run.room import disks, held_bytes, telling_full_disks
from tasks.run.workspace import open_leased
from tests.support.paths import ROOT

WEIGHTS, STATE = 10, 21
smoke = functools.cache(partial(load, "smoke"))


@given(st.integers(2, 5), st.integers(0, 7), st.integers(1, 7), st.integers(1, 40), st.booleans())
def test_a_run_never_holds_more_than_was_said(last: int, every: int, evaluated: int, end: int, keeps: bool) -> None:
    """Between a commit and what is deleted then, there is one checkpoint more; at the end one place is free."""
    base, keep = smoke(), Keep(last=last, every=every) if keeps else None
    config = base.model_copy(
        update={
            "run": base.run.model_copy(update={"iterations": end}),
            "evaluation": base.evaluation.model_copy(update={"every": evaluated}),
            "storage": base.storage.model_copy(update={"keep": keep}),
        }
    )
    held = WEIGHTS, 0
    for newest in range(1, end + 1):
        before = held[0] + held[1]
        numbers = range(1, newest + 1)
        whole = {n for n in numbers if not keeps or n > newest - last or (every and n % every == 0)}
        weights = whole | {n for n in numbers if n % evaluated == 0}
        held = WEIGHTS * (1 + len(weights)), STATE * len(whole)
        assert before + WEIGHTS + STATE <= held_bytes(config, WEIGHTS, STATE)
    assert sum(held) == held_bytes(config, WEIGHTS, STATE) - WEIGHTS - STATE


def test_two_folders_on_one_disk_share_its_room(tmp_path: Path) -> None:
    """A checkpoint is there twice while it is stored. A bucket has no end, but the cache has copies, up to its size."""
    local = load("smoke", [f"storage.root={tmp_path}/var", f"storage.cache={tmp_path}/not/yet/there"])
    (both,) = disks(local, 100, 200)
    total = held_bytes(local, 100, 200)
    assert (both.folder, both.next, both.more) == (f"{tmp_path}/not/yet/there", 600, total + 300)
    assert both.free == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)
    remote = local.model_copy(update={"storage": local.storage.model_copy(update={"root": "s3://bucket/x"})})
    (cache,) = disks(remote, 100)
    assert (cache.next, cache.more) == (300, total + 300)  # without a state, two moments are computed
    limited = remote.model_copy(update={"storage": remote.storage.model_copy(update={"cache_gib": 4e-7})})
    assert disks(limited, 100)[0].more == 300 + int(4e-7 * 2**30)
    assert "need 300 bytes for the next one" in str(cache)


def test_the_plan_says_it() -> None:
    """A checkpoint of Qwen2.5-7B has 30 GB of weights and 61 GB of moments; it is written twice on one disk."""
    assert "disk: ./var/cache has " in plan(load("gsm8k-7b"))
    assert "need 182.8 GB for the next one" in plan(load("gsm8k-7b"))


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
