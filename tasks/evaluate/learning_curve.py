"""The learning curve of a run: its committed iterations and evaluations, their numbers, and a plot of them."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from configs import Config
from configs.evaluate import HELD_OUT
from storage import layout
from storage.logs import catalog
from storage.objects.store import Store
from storage.version_names import EvaluationVersion, ProblemsVersion, ScoresVersion
from storage.versions import manifests
from storage.versions.lineage import scores_of, trained_on
from tasks.evaluate.outcomes import Outcome, compare, read_outcomes, summarise
from tasks.evaluate.protocol import greedy
from tasks.evaluate.statistics import proportion

_MEASURES = ("first_turn", "any_turn")


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
class LearningCurve:
    """The committed iterations and evaluations of a run."""

    name: str
    iterations: list[Iteration]
    evaluations: list[Evaluation]  # ordered by policy version


def read_learning_curve(
    store: Store, config: Config, scorer: str, held_out: ProblemsVersion, cache: Path
) -> LearningCurve:
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
    return LearningCurve(name, done, evaluations)


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


def summary(curve: LearningCurve) -> dict[str, Any]:
    """Compute all numbers of the report, JSON-ready."""
    evaluations = [
        {"policy_version": evaluation.policy_version} | summarise(evaluation.outcomes)
        for evaluation in curve.evaluations
    ]
    result: dict[str, Any] = {
        "run": curve.name,
        "iterations": len(curve.iterations),
        "evaluations": evaluations,
        "stages": _stages(curve.iterations),
        "training": [
            {"iteration": iteration.number} | iteration.rollout | iteration.train for iteration in curve.iterations
        ],
    }
    if len(curve.evaluations) > 1:
        result["improvement"] = _improvement(curve.evaluations[0], curve.evaluations[-1])
    return result


def _improvement(before: Evaluation, after: Evaluation) -> dict[str, Any]:
    """Compute the paired differences between the last and the first evaluation on the same problems."""
    comparison = compare(before.outcomes, after.outcomes)
    return {key: comparison[key]["difference"] for key in _MEASURES}


def _stages(iterations: Sequence[Iteration]) -> dict[str, dict[str, float]]:
    """Compute the mean seconds of each stage's own work, tokens per second, and the mean staleness in training."""
    if not iterations:
        return {}
    rollout = [iteration.rollout for iteration in iterations]
    seconds = fmean(metrics["seconds"] for metrics in rollout)
    stages = {
        "rollout": {
            "seconds": seconds,
            "tokens_per_second": fmean(metrics["generated_tokens"] for metrics in rollout) / seconds,
        },
        "score": {"seconds": fmean(iteration.score["seconds"] for iteration in iterations)},
    }
    train = [iteration.train for iteration in iterations if iteration.train["trajectories"]]
    if train:
        learning = fmean(metrics["seconds/prepare"] + metrics["seconds/update"] for metrics in train)
        stages["train"] = {
            "seconds": learning,
            "tokens_per_second": fmean(metrics["tokens/all"] for metrics in train) / learning,
            "staleness": fmean(metrics["staleness/mean"] for metrics in train),
        }
    return stages


def plot(curve: LearningCurve, path: Path) -> None:
    """Plot held-out accuracy with intervals, and the success of the training episodes, over the iterations."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    sampled = [
        (i.number, i.rollout["success"][0], i.rollout["solved"]) for i in curve.iterations if i.rollout["success"]
    ]
    if sampled:
        numbers, first, solved = zip(*sampled, strict=True)
        axes.plot(
            numbers, first, color="tab:blue", alpha=0.35, linewidth=1, label="training episodes, first turn (sampled)"
        )
        axes.plot(
            numbers, solved, color="tab:orange", alpha=0.35, linewidth=1, label="training episodes, any turn (sampled)"
        )
    for key, name, color in (("first", "first turn", "tab:blue"), ("any", "any turn", "tab:orange")):
        points = [proportion([getattr(outcome, key) for outcome in e.outcomes]) for e in curve.evaluations]
        if points:
            versions = [e.policy_version for e in curve.evaluations]
            values = [point.value for point in points]
            spread = [[p.value - p.low for p in points], [p.high - p.value for p in points]]
            axes.errorbar(versions, values, yerr=spread, marker="o", capsize=3, color=color, label=f"held-out, {name}")
    axes.set(xlabel="policy version (PPO updates)", ylabel="accuracy", ylim=(0, 1), title=f"Run {curve.name}")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=150)
