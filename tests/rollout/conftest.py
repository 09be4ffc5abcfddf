"""A run whose policies have no weights: its engines only wait."""

import random
from pathlib import Path

import pytest

from storage import layout
from storage.objects.store import Store
from storage.records import Trajectory
from storage.versions import datasets
from storage.versions.checkpoints import Canary, Checkpoint
from storage.versions.drafts import Draft, Provenance
from storage.versions.manifests import Manifest
from tasks.agents.chat import Chat

RUN = "r"


@pytest.fixture
def without_weights(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every policy have the chat of the tiny one."""
    monkeypatch.setattr("tasks.rollout.workers.load_chat", lambda _: chat)


def policy(number: int) -> Checkpoint:
    manifest = Manifest.model_construct(files=[])
    return Checkpoint(layout.checkpoint(RUN, number), number, Path(), None, Canary([], []), manifest)


def heavy_tail(seed: int) -> float:
    """Return log-normal seconds, with a median of 4 ms: some are ten times as long."""
    return min(0.2, random.Random(seed).lognormvariate(-5.5, 1.0))


def prepare(store: Store, policies: int = 1) -> None:
    """Commit what data sets have as parents."""
    with Draft(store, "problems/x", "problems") as draft:
        draft.commit(Provenance(config={}), [])
    for number in range(policies):
        with Draft(store, layout.checkpoint(RUN, number), "checkpoint") as draft:
            draft.commit(Provenance(config={}), [])


def rows_of(store: Store, iteration: int) -> list[Trajectory]:
    return list(datasets.trajectories(store, layout.trajectories(RUN, iteration), Path(store.root)))
