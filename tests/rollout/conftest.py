"""A run whose policies have no weights: its engines only wait."""

import random
from pathlib import Path

import pytest

from storage import layout
from storage.objects.store import Store
from storage.records import Trajectory
from storage.versions import datasets, manifests
from storage.versions.checkpoints import Canary, Checkpoint
from storage.versions.drafts import Draft, Provenance
from storage.versions.manifests import Kind, Manifest
from tasks.agents.chat import Chat

RUN = "r"


@pytest.fixture
def store(store: Store) -> Store:
    """Return a store with what the data sets of a run have as parents."""
    parents: list[tuple[str, Kind]] = [("problems/x", "problems")]
    parents += [(layout.checkpoint(RUN, number), "checkpoint") for number in range(6)]
    for version, kind in parents:
        with Draft(store, version, kind) as draft:
            draft.commit(Provenance(config={}), [])
    return store


@pytest.fixture
def without_weights(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every policy have the chat of the tiny one."""
    monkeypatch.setattr("tasks.rollout.workers.load_chat", lambda _: chat)


def policy(number: int) -> Checkpoint:
    manifest = Manifest.model_construct(files=[])
    return Checkpoint(layout.checkpoint(RUN, number), number, Path(), None, Canary([], []), "attempt", manifest)


def heavy_tail(seed: int) -> float:
    """Return log-normal seconds, with a median of 4 ms: some are ten times as long."""
    return min(0.2, random.Random(seed).lognormvariate(-5.5, 1.0))


def rows_of(store: Store, iteration: int) -> list[Trajectory]:
    return list(datasets.trajectories(store, layout.trajectories(RUN, iteration), Path(store.root)))


def check_stream(store: Store, iterations: int, groups: int, samples: int, staleness: int) -> list[Trajectory]:
    """Check the data sets of a stream: each drawn group is in one, and the tokens' versions keep the bound."""
    everything, numbers = list[Trajectory](), list[int]()
    for index in range(iterations):
        rows, manifest = rows_of(store, index), manifests.read(store, layout.trajectories(RUN, index))
        assert len(rows) == groups * samples
        assert {row.iteration for row in rows} == {index}
        versions = {version for row in rows for version in row.versions} - {-1}
        assert index - staleness <= min(versions) <= max(versions) <= index
        parents = {parent.version for parent in manifest.parents}
        assert parents >= {"problems/x"} | {layout.checkpoint(RUN, version) for version in versions}
        everything += rows
        numbers += manifest.metrics["stream"]["groups"]
    assert len({row.trajectory_id for row in everything}) == len(everything)
    assert sorted(numbers) == list(range(groups * iterations))
    return everything
