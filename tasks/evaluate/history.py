"""A run's committed history, read back from its manifests: what the report is made of."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs import Config
from configs.schema import HELD_OUT
from storage import layout
from storage.logs import catalog
from storage.objects.store import Store
from storage.version_names import EvaluationVersion, ProblemsVersion, ScoresVersion
from storage.versions import manifests
from storage.versions.lineage import scores_of, trained_on
from tasks.evaluate.outcomes import Outcome, read_outcomes
from tasks.evaluate.protocol import greedy


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
    scores: ScoresVersion
    outcomes: list[Outcome]


@dataclass(frozen=True, slots=True)
class History:
    """All that a run has committed."""

    name: str
    iterations: list[Iteration]
    evaluations: list[Evaluation]  # by policy version


def read_history(store: Store, config: Config, scorer: str, held_out: ProblemsVersion, cache: Path) -> History:
    """The committed iterations of a run and its greedy evaluations on `held_out`.

    An evaluation's scores are those of judge `scorer`; where there are none, the newest of another judge.
    """
    name, done = config.run.name, list[Iteration]()
    for number in range(config.run.iterations):
        if not manifests.committed(store, layout.checkpoint(name, number + 1)):
            break  # the run goes on from here
        done.append(_iteration(store, name, number))
    protocol, evaluations = greedy(config, HELD_OUT, held_out), list[Evaluation]()
    every_judge = functools.cache(lambda: scores_of(catalog.read_all(store)))
    for version in range(len(done) + 1):
        trajectories = protocol.evaluation(layout.checkpoint(name, version))
        if scores := _judged(store, trajectories, scorer, every_judge):
            evaluations.append(Evaluation(version, scores, read_outcomes(store, trajectories, scores, cache)))
    return History(name, done, evaluations)


def _judged(
    store: Store, evaluation: EvaluationVersion, scorer: str, every_judge: Callable[[], dict[str, list[str]]]
) -> ScoresVersion | None:
    """The scores of an evaluation; None where it was not played, or not judged yet."""
    scores = layout.evaluation_scores(evaluation, scorer)
    if manifests.committed(store, scores):
        return scores
    if not manifests.committed(store, evaluation):
        return None
    others = every_judge().get(evaluation, [])
    return next((ScoresVersion(version) for version in reversed(others) if manifests.committed(store, version)), None)


def _iteration(store: Store, name: str, number: int) -> Iteration:
    trajectories, scores = trained_on(store, name, number)
    return Iteration(
        number,
        rollout=manifests.read(store, trajectories).metrics,
        score=manifests.read(store, scores).metrics,
        train=manifests.read(store, layout.checkpoint(name, number + 1)).metrics,
    )
