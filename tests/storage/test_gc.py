"""Garbage collection deletes the data that are not needed, and nothing else."""

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from storage import layout
from storage.errors import StorageError
from storage.logs import leases
from storage.logs.leases import Lease, own_identity
from storage.logs.log import Log
from storage.maintenance import gc as garbage
from storage.maintenance.copying import copy_run
from storage.maintenance.gc import Rules
from storage.maintenance.verify import verify
from storage.objects.store import Store
from storage.version_names import PolicyVersion, Version
from storage.versions import aliases, checkpoints, manifests
from storage.versions.drafts import Draft, JournaledDraft, Provenance
from storage.versions.fetch import fetch
from storage.versions.manifests import read

NOW = Rules(older_than_s=0)


def commit(
    store: Store,
    version: str,
    kind: manifests.Kind,
    parents: Sequence[str],
    config: dict[str, object],
    fence: Lease | None = None,
) -> str:
    with Draft(store, version, kind) as draft:
        path = draft.scratch / "data"
        path.write_text(version)
        draft.add(path, "data")
        if kind == "checkpoint":
            path.write_text('{"token_ids": [1, 2], "logprobs": [-1.0]}')
            for name in ("canary.json", "model/config.json"):
                draft.add(path, name)
            save_file({"weight": np.zeros(3, dtype=np.float32)}, path)
            for name in ("model/model.safetensors", "state/optimizer.safetensors"):
                draft.add(path, name)
        draft.commit(Provenance(config=config, fence=fence), parents)
    return version


def chain(store: Store, name: str, checkpoints: int, config: dict[str, object] | None = None) -> list[str]:
    """Commit a run and return its checkpoints.

    The first is made from the run, each later one from the checkpoint before and a data set of trajectories.
    """
    settings = config or {}
    run = commit(store, layout.run(name), "run", [], settings)
    versions = [commit(store, layout.checkpoint(name, 0), "checkpoint", [run], settings)]
    for number in range(1, checkpoints):
        rows = commit(store, layout.trajectories(name, number - 1), "trajectories", [versions[-1]], settings)
        versions.append(commit(store, layout.checkpoint(name, number), "checkpoint", [versions[-1], rows], settings))
    return versions


def has_data(store: Store, version: str) -> bool:
    return all(store.exists(file.path) for file in read(store, version).files)


def with_data(store: Store, versions: Sequence[str]) -> list[int]:
    """Return the indices of the versions whose data are all there."""
    return [number for number, version in enumerate(versions) if has_data(store, version)]


def test_the_last_and_every_mth_stay(store: Store, tmp_path: Path) -> None:
    """gc keeps the first, every fourth and the last two of ten checkpoints. All manifests and so the lineage stay."""
    versions = chain(store, "r", 10)
    rules = Rules(keep_last=2, keep_every=4)
    planned = garbage.plan(store, rules)
    assert [plan.run for plan in planned] == ["r"]
    assert with_data(store, versions) == list(range(10))  # planning deletes nothing
    assert [len(plan.versions) for plan in garbage.collect(store, rules)] == [6]
    assert with_data(store, versions) == [0, 4, 8, 9]
    with pytest.raises(StorageError, match="was collected by gc"):
        fetch(store, read(store, versions[5]), "data", tmp_path)
    with pytest.raises(StorageError, match="was collected by gc"):  # a policy without weights cannot be promoted
        aliases.move(store, "champion", versions[5], None)
    assert verify(store, [versions[9]]).findings == []
    assert garbage.plan(store, rules) == []


def test_what_an_alias_needs_stays(store: Store) -> None:
    """An alias keeps its version and all ancestors of it, the alias of the pipeline only the version."""
    versions = chain(store, "r", 8)
    aliases.move(store, "champion", versions[4], None)
    aliases.advance(store, "r/latest", versions[7])  # the pipeline's own alias keeps only its version
    garbage.collect(store, Rules(keep_last=1))
    assert with_data(store, versions) == [0, 1, 2, 3, 4, 7]


def test_a_run_keeps_what_it_needs_by_itself(store: Store, tmp_path: Path) -> None:
    """It keeps the last two, every fifth, the first, what an alias points at, and where a fork began, whole.

    What was evaluated keeps its weights. `gc` takes these later, and a copy of the run lacks nothing else.
    """
    versions = chain(store, "r", 11)
    commit(store, layout.checkpoint("fork", 0), "checkpoint", [layout.run("r"), versions[1]], {})
    aliases.move(store, "best", versions[3], None)
    for number in (2, 4):
        protocol = layout.evaluation(PolicyVersion(versions[number]), "held-out", "greedy-1f")
        commit(store, protocol, "evaluation", [versions[number]], {})
    own = Rules(keep_last=2, keep_every=5, ancestors=False, evaluated=True)
    with Lease(store, "r") as lease:
        assert [len(plan.versions) for plan in garbage.collect_leased(store, lease, replace(own, after=6))] == [2]
        assert [len(plan.versions) for plan in garbage.collect_leased(store, lease, own)] == [3]
        assert garbage.collect_leased(store, lease, own) == []
    left = [{file.name for file in manifests.left(store, read(store, version))} for version in versions]
    whole, weights = left[0], {name for name in left[0] if not name.startswith("state/")}
    assert left == [whole, whole, weights, whole, weights, whole, set(), set(), set(), whole, whole]
    with pytest.raises(
        StorageError, match=r"its train state is gone; the nearest .* whole is runs/r/checkpoints/000003"
    ):
        fetch(store, read(store, versions[4]), "state/optimizer.safetensors", tmp_path)
    with pytest.raises(StorageError, match=r"its data are gone; the nearest .* whole is runs/r/checkpoints/000009"):
        checkpoints.resolve_policy(store, versions[8])
    report, target = verify(store, versions), Store(str(tmp_path / "copy"))
    assert (report.findings, report.collected) == ([], 3)
    copy_run(store, target, "r")
    assert verify(target, versions).findings == []
    assert manifests.left(target, read(target, versions[4])) == manifests.left(store, read(store, versions[4]))
    garbage.collect(store, Rules(keep_last=1, kinds=("checkpoint",)))
    assert with_data(store, versions) == [0, 1, 3, 10]
    canaries = [store.exists(read(store, versions[number]).files[1].path) for number in (2, 4)]
    assert canaries == [True, False]  # `best` was made from number 2


def test_data_sets_are_collected_only_if_asked(store: Store) -> None:
    """By default gc collects only checkpoints: data sets are small, and audits need them.

    It never collects those that were not trained on yet: a killed run with overlap may leave two rollouts, and
    continues with the older one.
    """
    chain(store, "r", 6)
    rows = [layout.trajectories("r", number) for number in range(7)]
    for version in rows[5:]:
        commit(store, version, "trajectories", [], {})
    garbage.collect(store, Rules(keep_last=1))
    assert with_data(store, rows) == list(range(7))
    garbage.collect(store, Rules(keep_last=1, kinds=("trajectories",)))
    assert with_data(store, rows) == [0, 5, 6]


def test_a_live_run_is_not_touched(any_store: Store) -> None:
    """gc deletes neither versions nor drafts of a run that is being written, but it collects other runs meanwhile.

    After the lease is released, gc collects this run as well.
    """
    versions, others = chain(any_store, "r", 6), chain(any_store, "other", 6)
    with Lease(Store(any_store.root), "r", label="flow run quick-quail"):
        draft = Draft(any_store, layout.checkpoint("r", 6), "checkpoint")
        path = draft.scratch / "data"
        path.write_text("half")
        draft.add(path, "data")
        time.sleep(1.1)  # S3 stores times in whole seconds
        held = {plan.run: plan.held_by for plan in garbage.plan(any_store, Rules(keep_last=1, older_than_s=0))}
        assert "quick-quail" in (held["r"] or "")
        assert held["other"] is None
        garbage.collect(any_store, Rules(keep_last=1, older_than_s=0))
        assert with_data(any_store, versions) == list(range(6))
        assert any_store.exists(draft.files[0].path)
    assert with_data(any_store, others) == [0, 5]
    garbage.collect(any_store, Rules(keep_last=1, older_than_s=0))
    assert with_data(any_store, versions) == [0, 5]
    assert not any_store.exists(draft.files[0].path)
    assert leases.is_held(any_store, "r") is None


def add(draft: Draft, name: str) -> str:
    """Add a file to a draft and return its key."""
    path = draft.scratch / "part"
    path.write_text(name)
    return draft.add(path, name).path


EVALUATION = layout.evaluation(layout.checkpoint("r", 0), "held-out", "greedy-1f")


@pytest.mark.parametrize(
    ("any_store", "version"),
    [("local", EVALUATION), ("s3", EVALUATION), ("local", layout.problems("1f0c"))],
    indirect=["any_store"],
)
def test_what_is_written_without_the_lease_of_a_run_is_not_touched(
    any_store: Store, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither `--older-than-hours 0` nor a clock that is days ahead lets gc delete from an attempt that is alive.

    What killed ones have left goes: at once if they were on this machine, else after their lease's time to live.
    """
    kind = version.kind
    with Draft(any_store, version, kind) as living:
        kept, dead = add(living, "rows"), list[str]()
        for changed in ({"started": 1}, {"machine": "another"}):
            killed = Draft(any_store, version, kind)
            dead.append(add(killed, "rows"))
            entry = {"holder": own_identity() | changed, "label": "", "at": "2026", "ttl_s": 0.1}
            log = Log(any_store, layout.lease(f"{version}/{killed.nonce}"))
            assert log.put(0, entry)
            dead.append(log.key(0))
        monkeypatch.setattr(garbage, "time", SimpleNamespace(time=lambda: time.time() + 2 * 86400))
        garbage.collect(any_store, NOW)
        assert any_store.exists(kept)
        living.commit(Provenance(config={}), [])
    garbage.collect(any_store, NOW)
    assert has_data(any_store, version)
    assert not any(map(any_store.exists, dead))
    assert [*any_store.walk(layout.lease(version))] == []


def test_leftovers_go_when_old(store: Store) -> None:
    """Old objects of attempts that were not committed and old temporary files are deleted.

    Committed data, shards in a journal and files that are not the pipeline's stay.
    """
    versions = chain(store, "r", 2)
    with JournaledDraft(store, layout.trajectories("r", 1), "trajectories") as killed:
        path = killed.scratch / "part"
        path.write_text("rows")
        killed.add_shard(path, "part-00000.parquet", 1, [])
    with Draft(store, versions[1], "checkpoint") as loser:  # lost the race for a committed version
        loser.add(Path(__file__), "data")
    temporary = Path(store.path("runs/r/run/.manifest.json.0123abcd.tmp"))
    temporary.write_text("")
    unknown = Path(store.path("runs/r/notes.txt"))
    unknown.write_text("somebody's own")
    old = time.time() - 3 * 86400
    for item in store.walk():
        os.utime(store.path(item.path), (old, old))
    before = {item.path for item in store.walk()}
    (plan,) = garbage.plan(store, Rules())
    assert {item.path for item in plan.leftovers} == {loser.files[0].path, "runs/r/run/.manifest.json.0123abcd.tmp"}
    garbage.collect(store, Rules())
    gone = before - {item.path for item in store.walk()}
    assert gone == {loser.files[0].path, "runs/r/run/.manifest.json.0123abcd.tmp"}
    assert verify(store, versions).findings == []


@pytest.mark.parametrize(
    ("key", "data"),
    [
        ("runs/r/checkpoints/000003/0123456789ab/model/0123456789ac/x", ("runs/r/checkpoints/000003", "0123456789ab")),
        ("runs/r/evaluations/000003/hard/greedy-1f/scores/5c/0123456789ab/x", ("hard/greedy-1f/scores/5c", "")),
        ("runs/r/checkpoints/3/0123456789ab/x", None),
        ("runs/r/scores/000003/notes/0123456789ab/x", None),
        ("problems/mine/0123456789ab/x", None),
        ("runs/r/checkpoints/000003/manifest.json", None),
    ],
)
def test_only_keys_as_versions_have_them_are_data(key: str, data: tuple[str, str] | None) -> None:
    """gc deletes by them, so a folder that somebody else has put beside the versions is none."""
    found = layout.data_of(key)
    assert (found is None) == (data is None)
    if found and data:
        assert found[0].endswith(data[0])
        assert found[1] == "0123456789ab"


def test_what_a_fit_of_another_run_needs_stays(store: Store) -> None:
    """Data sets that `flows.fit` names stay with their scores, also those that it has not used yet."""
    chain(store, "played", 8)
    data = [layout.trajectories("played", number) for number in range(3)]
    scores = [commit(store, layout.scores("played", n, "f00d"), "scores", [data[n]], {}) for n in range(3)]
    settings: dict[str, object] = {"fit": {"data": data[:2]}, "run": {"iterations": 2}}
    run = commit(store, layout.run("fitted"), "run", [], settings)
    newest = commit(store, layout.checkpoint("fitted", 0), "checkpoint", [run], settings)
    rules = Rules(keep_last=1, kinds=("trajectories", "scores"), older_than_s=0)

    def deleted() -> set[str]:
        return {version.version for planned in garbage.plan(store, rules) for version in planned.versions}

    for number in (1, 2):
        assert {*data[:2], *scores[:2]}.isdisjoint(deleted())
        assert data[2] in deleted()
        parents = [newest, data[0], scores[0]]
        newest = commit(store, layout.checkpoint("fitted", number), "checkpoint", parents, settings)
    assert {*data[:2], *scores[:2]}.isdisjoint(deleted())


def test_many_killed_attempts_are_watched_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that was killed on another machine is watched for a minute: one after the other, gc would take hours."""
    together = threading.Barrier(40, timeout=20)
    for number in range(together.parties):
        killed = Draft(store, layout.evaluation(layout.checkpoint("r", number), "held-out", "greedy-1f"), "evaluation")
        add(killed, "rows")
        assert Log(store, layout.lease(f"{killed.version}/{killed.nonce}")).put(0, {"holder": own_identity()})
    monkeypatch.setattr(garbage, "time", SimpleNamespace(time=lambda: time.time() + 2 * 86400))
    monkeypatch.setattr(leases, "is_free", lambda *_: together.wait() >= 0)
    (plan,) = garbage.plan(store, NOW)[:1]
    assert len(plan.leftovers) == together.parties


def test_what_other_runs_name_stays(store: Store) -> None:
    """A policy stays that a run is taught, judged or begun by, though no version was made from it yet.

    The configuration of a run may be corrected until policy version 0, and where its models are later.
    """
    versions = chain(store, "r", 12)
    begun = {"policy": {"fork": "r@2"}, "models": {"teacher": {"checkpoint": "r@3"}}}
    commit(store, layout.run("named"), "run", [], dict(begun))
    inside = store.uri(f"{versions[4]}/{read(store, versions[4]).nonce}/model")
    corrected = {"policy": {"path": store.uri(versions[5])}, "models": {"judge": {"path": inside}}}
    commit(store, layout.checkpoint("named", 0), "checkpoint", [], dict(corrected))
    moved = {"models": {"reward": {"path": store.uri(versions[6])}}}
    newest = commit(store, layout.checkpoint("named", 1), "checkpoint", [], dict(moved))
    aliases.advance(store, "named/latest", newest)
    with Lease(store, "r") as lease:
        garbage.collect_leased(store, lease, Rules(keep_last=1, ancestors=False, evaluated=True))
    assert with_data(store, versions) == [0, 2, 3, 4, 5, 6, 11]
    garbage.collect(store, Rules(keep_last=1))
    assert with_data(store, versions) == [0, 2, 3, 4, 5, 6, 11]
