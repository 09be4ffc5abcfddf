"""Finished shards outlive a killed writer, and two writers never mix their shards."""

from pathlib import Path
from typing import Any

import pytest

from storage import layout
from storage.errors import ConflictError
from storage.logs.log import Log
from storage.maintenance.verify import verify
from storage.objects.store import Store
from storage.records import TRAJECTORY_SCHEMA, Trajectory
from storage.versions import datasets
from storage.versions.datasets import ShardWriter
from storage.versions.drafts import Draft, JournaledDraft, Provenance, Shard
from tests.support.train_helpers import make_trajectory

VERSION = "runs/r/trajectories/000000"


def group(number: int) -> list[Trajectory]:
    return [make_trajectory(f"{number}/{sample}", [[7, 8]]) for sample in range(2)]


def write(draft: JournaledDraft, numbers: range) -> None:
    """Write groups of two rows. A shard ends with a whole group, so here each has four rows."""
    with ShardWriter(draft, TRAJECTORY_SCHEMA, rows_per_shard=3) as writer:
        for number in numbers:
            writer.write_group(group(number), {"problem_id": number})


def test_finished_shards_are_taken_over(any_store: Store, tmp_path: Path) -> None:
    """The second attempt takes over the finished shards of the first, adds its own, and commits each row once.

    Other processes may write shards in folders of their own; one entry names them all.
    """
    shards = list[Shard]()
    for number in (4, 5):
        with Draft(any_store, VERSION, "trajectories") as other:
            with ShardWriter(other, TRAJECTORY_SCHEMA, 4, prefix=f"part-{number}") as writer:
                writer.write_group(group(number))
            shards += [Shard(file, [{"problem_id": number}]) for file in other.files]
    with JournaledDraft(any_store, VERSION, "trajectories") as killed:
        write(killed, range(4))
        before = Log(any_store, layout.journal(VERSION)).length()
        killed.accept_shards(shards)  # and is never committed
        assert Log(any_store, layout.journal(VERSION)).length() == before + 1
    rows = [row for number in range(7) for row in group(number)]
    with JournaledDraft(any_store, VERSION, "trajectories") as draft:
        assert [note["problem_id"] for note in draft.notes] == [0, 1, 2, 3, 4, 5]
        assert [row.trajectory_id for row in datasets.adopted(draft)] == [row.trajectory_id for row in rows[:-2]]
        write(draft, range(6, 7))
        names = [file.name for file in draft.commit(Provenance(config={}), []).files]
    assert len(names) == len(set(names)) == 5
    assert list(datasets.trajectories(any_store, VERSION, tmp_path)) == rows
    assert verify(any_store, [VERSION], deep=True).findings == []


def test_the_earlier_writer_stops(any_store: Store) -> None:
    """A writer that was thought dead finds that another writer has taken over the journal, and adds nothing."""
    with JournaledDraft(any_store, VERSION, "trajectories") as old:
        write(old, range(2))
        with JournaledDraft(Store(any_store.root), VERSION, "trajectories") as new:
            with pytest.raises(ConflictError, match="another writer has taken over this version"):
                write(old, range(2, 4))
            write(new, range(2, 4))
            assert [file.rows for file in new.commit(Provenance(config={}), []).files] == [4, 4]


def test_a_shard_that_is_gone_or_damaged_is_made_again(store: Store) -> None:
    """Its groups do not count as played: gc may have deleted it as a leftover, or a disk has changed it."""
    with JournaledDraft(store, VERSION, "trajectories") as killed:
        write(killed, range(6))
    store.delete(killed.files[0].path)
    damaged = killed.files[1].path
    store.write(damaged, store.read(damaged)[:-1] + b"x")
    with JournaledDraft(store, VERSION, "trajectories") as draft:
        assert [note["problem_id"] for note in draft.notes] == [4, 5]
        write(draft, range(4))
        names = [file.name for file in draft.commit(Provenance(config={}), []).files]
    assert len(names) == len(set(names)) == 3


@pytest.mark.parametrize("entry", [b"{", {}, {"adopted": [["a"]]}, {"file": None, "notes": []}, {"shards": [3]}])
def test_shards_up_to_a_damaged_entry_are_made_again(entry: Any, store: Store) -> None:
    """Damage, or a right digest with wrong fields, stops no restart; shards entered after it are taken over."""
    with JournaledDraft(store, VERSION, "trajectories") as first:
        write(first, range(2))
        if isinstance(entry, bytes):
            store.write(f"{VERSION}/journal/00000001.json", entry)
        else:
            Log(store, layout.journal(VERSION)).append(entry)
    with JournaledDraft(store, VERSION, "trajectories") as second:
        assert second.notes == []
        write(second, range(2, 4))
    with JournaledDraft(store, VERSION, "trajectories") as third:
        assert [note["problem_id"] for note in third.notes] == [2, 3]


def test_entries_of_earlier_programs_are_read(store: Store) -> None:
    """They hold one shard each, without a list."""
    with JournaledDraft(store, VERSION, "trajectories") as first:
        write(first, range(2))
    log = Log(store, layout.journal(VERSION))
    (shard,) = log.read(1)["shards"]
    first.discard()  # a rollout that failed as a whole is played again as a whole
    assert JournaledDraft(store, VERSION, "trajectories").adopted == []
    log.append({"attempt": first.nonce, **shard})
    with JournaledDraft(store, VERSION, "trajectories") as second:
        assert second.adopted == first.files
