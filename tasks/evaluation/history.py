"""A run's committed history, read back from its manifests: what the report is made of."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage import datasets, layout, manifests
from storage.store import Store
from tasks.evaluation.outcomes import Outcome, read_outcomes


@dataclass(frozen=True, slots=True)
class Iteration:
    """Metrics of one iteration's three stages."""

    number: int
    rollout: dict[str, Any]
    score: dict[str, Any]
    train: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One policy version on the held-out problems."""

    policy_version: int
    outcomes: list[Outcome]


@dataclass(frozen=True, slots=True)
class History:
    """All that a run has committed."""

    name: str
    iterations: list[Iteration]
    evaluations: list[Evaluation]  # by policy version


def read_history(store: Store, name: str, scorer: str, iterations: int, cache: Path) -> History:
    """The committed iterations and evaluations of a run, up to `iterations`; found by name, never by listing."""
    done = []
    for number in range(iterations):
        if not manifests.committed(store, layout.checkpoint(name, number + 1)):
            break  # the run goes on from here
        done.append(_iteration(store, name, scorer, number))
    evaluations = [
        _evaluation(store, name, scorer, version, cache)
        for version in range(len(done) + 1)
        if manifests.committed(store, layout.evaluation_scores(name, version, scorer))
    ]
    return History(name, done, evaluations)


def _iteration(store: Store, name: str, scorer: str, number: int) -> Iteration:
    return Iteration(
        number,
        rollout=manifests.read(store, layout.trajectories(name, number)).metrics,
        score=manifests.read(store, layout.scores(name, number, scorer)).metrics,
        train=manifests.read(store, layout.checkpoint(name, number + 1)).metrics,
    )


def _evaluation(store: Store, name: str, scorer: str, version: int, cache: Path) -> Evaluation:
    _, trajectories = datasets.shards(store, layout.evaluation(name, version), cache)
    _, scores = datasets.shards(store, layout.evaluation_scores(name, version, scorer), cache)
    return Evaluation(version, read_outcomes(trajectories, scores))
