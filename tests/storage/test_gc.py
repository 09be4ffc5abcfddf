"""Garbage collection deletes the data that are not needed, and nothing else."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from storage import layout
from storage.errors import StorageError
from storage.logs import leases
from storage.logs.leases import Lease
from storage.maintenance import gc as garbage
from storage.maintenance.copying import copy_run
from storage.maintenance.gc import Rules
from storage.maintenance.verify import verify
from storage.objects.store import Store
from storage.version_names import PolicyVersion
from storage.versions import aliases, checkpoints, manifests
from storage.versions.drafts import Draft, JournaledDraft
from storage.versions.fetch import fetch
from storage.versions.manifests import read
from tests.support.chain_helpers import commit_run, commit_text

EVALUATION = layout.evaluation(layout.checkpoint("r", 0), "held-out", "greedy-1f")


def with_data(store: Store, versions: Sequence[str]) -> list[int]:
    """Return the indices of the versions whose data are all there."""
    files = [read(store, version).files for version in versions]
    return [number for number, of in enumerate(files) if all(store.exists(file.path) for file in of)]


def test_the_last_and_every_mth_stay(store: Store, tmp_path: Path) -> None:
    """gc keeps the first, every fourth and the last two of ten checkpoints. All manifests and data sets stay."""
    versions = commit_run(store, "r", 10)
    rules = Rules(keep_last=2, keep_every=4)
    assert [found.run for found in garbage.find_garbage(store, rules)] == ["r"]
    assert with_data(store, versions) == list(range(10))  # nothing was deleted
    assert [len(found.versions) for found in garbage.collect(store, rules)] == [6]
    assert with_data(store, versions) == [0, 4, 8, 9]
    assert with_data(store, [layout.trajectories("r", number) for number in range(9)]) == list(range(9))
    with pytest.raises(StorageError, match="was collected by gc"):
        fetch(store, read(store, versions[5]), "data", tmp_path)
    with pytest.raises(StorageError, match="was collected by gc"):  # a policy without weights cannot be promoted
        aliases.move(store, "champion", versions[5], None)
    assert verify(store, [versions[9]]).findings == []
    assert garbage.find_garbage(store, rules) == []


def test_what_an_alias_needs_stays(store: Store) -> None:
    """An alias keeps its version and all ancestors of it, the alias of the pipeline only the version."""
    versions = commit_run(store, "r", 8)
    aliases.move(store, "champion", versions[4], None)
    aliases.advance(store, "r/latest", versions[7])
    garbage.collect(store, Rules(keep_last=1))
    assert with_data(store, versions) == [0, 1, 2, 3, 4, 7]


def test_a_run_keeps_what_it_needs_by_itself(store: Store, tmp_path: Path) -> None:
    """It keeps the last two, every fifth, the first, what an alias points at, and where a fork began, whole.

    What was evaluated keeps its weights. `gc` takes these later, and a copy of the run lacks nothing else.
    """
    versions = commit_run(store, "r", 11)
    commit_text(store, layout.checkpoint("fork", 0), layout.run("r"), versions[1])
    aliases.move(store, "best", versions[3], None)
    for number in (2, 4):
        policy = PolicyVersion(versions[number])
        commit_text(store, layout.evaluation(policy, "held-out", "greedy-1f"), policy)
    own = Rules(keep_last=2, keep_every=5, ancestors=False, evaluated=True)
    assert [len(found.versions) for found in garbage.collect_run(store, "r", replace(own, after=6))] == [2]
    assert [len(found.versions) for found in garbage.collect_run(store, "r", own)] == [3]
    assert garbage.collect_run(store, "r", own) == []
    left = [{file.name for file in manifests.left(store, read(store, version))} for version in versions]
    whole, weights = left[0], {name for name in left[0] if not name.startswith("state/")}
    assert left == [whole, whole, weights, whole, weights, whole, set(), set(), set(), whole, whole]
    with pytest.raises(StorageError, match="its train state is gone"):
        fetch(store, read(store, versions[4]), "state/optimizer.safetensors", tmp_path)
    with pytest.raises(StorageError, match="its data are gone"):
        checkpoints.resolve_policy(store, versions[8])
    report, target = verify(store, versions), Store(str(tmp_path / "copy"))
    assert (report.findings, report.collected) == ([], 3)
    copy_run(store, target, "r")
    assert verify(target, versions).findings == []
    assert manifests.left(target, read(target, versions[4])) == manifests.left(store, read(store, versions[4]))
    garbage.collect(store, Rules(keep_last=1))
    assert with_data(store, versions) == [0, 1, 3, 10]
    canaries = [store.exists(read(store, versions[number]).files[1].path) for number in (2, 4)]
    assert canaries == [True, False]  # `best` was made from number 2


def test_a_live_run_is_not_touched(any_store: Store) -> None:
    """gc deletes neither versions nor drafts of a run that is being written, but it collects other runs meanwhile.

    After the lease is released, gc collects this run as well.
    """
    versions, others = commit_run(any_store, "r", 6), commit_run(any_store, "other", 6)
    rules = Rules(keep_last=1, older_than_s=0)
    with Lease(Store(any_store.root), "r", label="flow run quick-quail"):
        draft = Draft(any_store, layout.checkpoint("r", 6), "checkpoint")
        draft.add(Path(__file__), "data")
        time.sleep(1.1)  # S3 stores times in whole seconds
        held = {found.run: found.held_by for found in garbage.find_garbage(any_store, rules)}
        assert "quick-quail" in (held["r"] or "")
        assert held["other"] is None
        garbage.collect(any_store, rules)
        assert with_data(any_store, versions) == list(range(6))
        assert any_store.exists(draft.files[0].path)
    assert with_data(any_store, others) == [0, 5]
    garbage.collect(any_store, rules)
    assert with_data(any_store, versions) == [0, 5]
    assert not any_store.exists(draft.files[0].path)
    assert leases.is_held(any_store, "r") is None


def test_leftovers_go_when_old(store: Store) -> None:
    """Old objects of attempts that were not committed and old temporary files are deleted.

    Committed data, shards in a journal and files that are not the pipeline's stay, also in a folder beside the
    versions. So does, for a week and whatever the rules say, what is written without the lease of a run: nothing else
    shows that its writer lives.
    """
    versions = commit_run(store, "r", 2)
    with JournaledDraft(store, layout.trajectories("r", 1), "trajectories") as killed:
        (killed.scratch / "part").write_text("rows")
        killed.add_shard(killed.scratch / "part", "part-00000.parquet", 1, [])
    with Draft(store, versions[1], "checkpoint") as loser:  # lost the race for a committed version
        loser.add(Path(__file__), "data")
    with Draft(store, EVALUATION, "evaluation") as unleased:
        unleased.add(Path(__file__), "part-00000.parquet")
    dead = "leases/problems/1f0c/0123456789ab/00000000.json"  # of an attempt of an earlier program
    temporary = "runs/r/run/.manifest.json.0123abcd.tmp"
    nested = "runs/r/checkpoints/000003/0123456789ab/model/0123456789ac/x"
    theirs = ["runs/r/notes.txt", "runs/r/checkpoints/3/0123456789ab/x", "runs/r/scores/000003/notes/0123456789ab/x"]
    for key in (dead, temporary, nested, *theirs, "problems/mine/0123456789ab/x"):
        store.write(key, b"{}")

    def collected(age_s: float) -> set[str]:
        before = {item.path for item in store.walk()}
        for path in before:
            os.utime(store.path(path), (time.time() - age_s, time.time() - age_s))
        found = {item.path for of in garbage.find_garbage(store, Rules(older_than_s=3600)) for item in of.leftovers}
        garbage.collect(store, Rules(older_than_s=3600))
        assert before - {item.path for item in store.walk()} == found
        return found

    assert collected(86400) == {loser.files[0].path, temporary, nested}
    assert collected(garbage.UNLEASED_S + 60) == {unleased.files[0].path, dead}
    assert verify(store, versions).findings == []


def test_what_other_runs_name_stays(store: Store) -> None:
    """A policy stays that a run is taught, judged or begun by, though no version was made from it yet.

    The configuration of a run may be corrected until policy version 0, and where its models are later.
    """
    versions = commit_run(store, "r", 12)
    begun = {"policy": {"fork": "r@2"}, "models": {"teacher": {"checkpoint": "r@3"}}}
    commit_text(store, layout.run("named"), config=begun)
    inside = store.uri(f"{versions[4]}/{read(store, versions[4]).nonce}/model")
    corrected = {"policy": {"path": store.uri(versions[5])}, "models": {"judge": {"path": inside}}}
    commit_text(store, layout.checkpoint("named", 0), config=corrected)
    moved = {"models": {"reward": {"path": store.uri(versions[6])}}}
    newest = commit_text(store, layout.checkpoint("named", 1), config=moved)
    aliases.advance(store, "named/latest", newest)
    garbage.collect_run(store, "r", Rules(keep_last=1, ancestors=False, evaluated=True))
    assert with_data(store, versions) == [0, 2, 3, 4, 5, 6, 11]
    garbage.collect(store, Rules(keep_last=1))
    assert with_data(store, versions) == [0, 2, 3, 4, 5, 6, 11]
