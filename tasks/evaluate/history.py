"""Read a run's committed history from its manifests, for the report."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs import Config
from configs.evaluate import HELD_OUT
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
    """The metrics of one iteration's three stages."""

    number: int
    rollout: dict[str, Any]
    score: dict[str, Any]
    train: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The outcomes of one policy version on the held-out problems."""

    policy_version: int
    scores: ScoresVersion
    outcomes: list[Outcome]


@dataclass(frozen=True, slots=True)
class History:
    """The committed iterations and evaluations of a run."""

    name: str
    iterations: list[Iteration]
    evaluations: list[Evaluation]  # ordered by policy version


def read_history(store: Store, config: Config, scorer: str, held_out: ProblemsVersion, cache: Path) -> History:
    """Read the committed iterations of a run and its greedy evaluations on `held_out`.

    Use the scores of the verifier with fingerprint `scorer`, or else the newest scores of another verifier.
    """
    name, done = config.run.name, list[Iteration]()
    for number in range(config.run.iterations):
        if not manifests.committed(store, layout.checkpoint(name, number + 1)):
            break  # the run will continue here
        done.append(_iteration(store, name, number))
    protocol, evaluations = greedy(config, HELD_OUT, held_out), list[Evaluation]()
    scores_by_evaluation = functools.cache(lambda: scores_of(catalog.read_all(store)))
    for version in range(len(done) + 1):
        trajectories = protocol.evaluation(layout.checkpoint(name, version))
        if scores := _find_scores(store, trajectories, scorer, scores_by_evaluation):
            evaluations.append(Evaluation(version, scores, read_outcomes(store, trajectories, scores, cache)))
    return History(name, done, evaluations)


def _find_scores(
    store: Store, evaluation: EvaluationVersion, scorer: str, scores_by_evaluation: Callable[[], dict[str, list[str]]]
) -> ScoresVersion | None:
    """Find the scores of an evaluation; None if it was not played, or not graded yet."""
    scores = layout.evaluation_scores(evaluation, scorer)
    if manifests.committed(store, scores):
        return scores
    if not manifests.committed(store, evaluation):
        return None
    others = scores_by_evaluation().get(evaluation, [])
    return next((ScoresVersion(version) for version in reversed(others) if manifests.committed(store, version)), None)


def _iteration(store: Store, name: str, number: int) -> Iteration:
    trajectories, scores = trained_on(store, name, number)
    return Iteration(
        number,
        rollout=manifests.read(store, trajectories).metrics,
        score=manifests.read(store, scores).metrics,
        train=manifests.read(store, layout.checkpoint(name, number + 1)).metrics,
    )
