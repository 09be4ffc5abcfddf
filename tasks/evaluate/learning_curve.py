"""The learning curve of a run: its committed iterations and evaluations, their numbers, and a plot of them."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from configs import Config
from configs.evaluate import HELD_OUT
from storage import layout
from storage.logs import catalog
from storage.objects.store import Store
from storage.version_names import ProblemsVersion, ScoresVersion
from storage.versions import manifests
from storage.versions.lineage import scores_of, trained_on
from tasks.evaluate.outcomes import Outcome, compare, read_outcomes, summarise
from tasks.evaluate.plotting import draw_estimates, plotted
from tasks.evaluate.protocol import greedy
from tasks.evaluate.statistics import proportion


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
        trajectories, scores = trained_on(store, name, number)
        versions = (trajectories, scores, layout.checkpoint(name, number + 1))
        done.append(Iteration(number, *(manifests.read(store, version).metrics for version in versions)))
    protocols = [greedy(config, HELD_OUT, held_out, with_code=known) for known in (True, False)]
    evaluations = list[Evaluation]()
    scores_by_evaluation = functools.cache(lambda: scores_of(catalog.read_all(store)))
    for number in range(len(done) + 1):
        named = (protocol.evaluation(layout.checkpoint(name, number)) for protocol in protocols)
        played = next((version for version in named if manifests.committed(store, version)), None)
        if played is None:
            continue
        graded = [layout.evaluation_scores(played, scorer)]
        if not manifests.committed(store, graded[0]):
            others = reversed(scores_by_evaluation().get(played, []))
            graded = [ScoresVersion(other) for other in others if manifests.committed(store, other)]
        if graded:
            evaluations.append(Evaluation(number, graded[0], read_outcomes(store, played, graded[0], cache)))
    return LearningCurve(name, done, evaluations)


def summary(curve: LearningCurve) -> dict[str, Any]:
    """Compute all numbers of the report, JSON-ready."""
    result: dict[str, Any] = {
        "run": curve.name,
        "iterations": len(curve.iterations),
        "evaluations": [
            {"policy_version": each.policy_version} | summarise(each.outcomes) for each in curve.evaluations
        ],
        "stages": _stages(curve.iterations),
        "training": [
            {"iteration": each.number, "scores": each.score} | each.rollout | each.train for each in curve.iterations
        ],
    }
    if len(curve.evaluations) > 1:  # the paired differences between the last and the first, on the same problems
        comparison = compare(curve.evaluations[0].outcomes, curve.evaluations[-1].outcomes)
        measures = [key for key in ("first_turn", "any_turn", "return") if comparison[key]]
        result["improvement"] = {key: comparison[key]["difference"] for key in measures}
    return result


def _stages(iterations: Sequence[Iteration]) -> dict[str, dict[str, float]]:
    """Compute the mean seconds of each stage's own work, tokens per second, and the mean staleness in training."""
    if not iterations:
        return {}

    def average(metrics: Sequence[dict[str, Any]], *names: str) -> float:
        return fmean(sum(each[name] for name in names) for each in metrics)

    rollout, score = ([getattr(each, stage) for each in iterations] for stage in ("rollout", "score"))
    seconds = average(rollout, "seconds")
    stages = {
        "rollout": {"seconds": seconds, "tokens_per_second": average(rollout, "generated_tokens") / seconds},
        "score": {"seconds": average(score, "seconds")},
    }
    if train := [each.train for each in iterations if each.train["trajectories"]]:
        seconds = average(train, "seconds/prepare", "seconds/update")
        tokens, staleness = average(train, "tokens/all"), average(train, "staleness/mean")
        stages["train"] = {"seconds": seconds, "tokens_per_second": tokens / seconds, "staleness": staleness}
    return stages


def plot(curve: LearningCurve, path: Path) -> None:
    """Plot held-out accuracy with intervals, and the success of the training episodes, over the iterations."""
    played = [iteration for iteration in curve.iterations if iteration.rollout["success"]]
    numbers = [iteration.number for iteration in played]
    first, solved = ([i.rollout["success"][0] for i in played], [i.rollout["solved"] for i in played])
    with plotted(path, 8, "accuracy", f"Run {curve.name}") as axes:
        for name, measure, color, shares in (
            ("first turn", "first", "tab:blue", first),
            ("any turn", "any", "tab:orange", solved),
        ):
            if shares:
                label = f"training episodes, {name} (sampled)"
                axes.plot(numbers, shares, color=color, alpha=0.35, linewidth=1, label=label)
            estimates = {
                each.policy_version: proportion([getattr(outcome, measure) for outcome in each.outcomes])._asdict()
                for each in curve.evaluations
            }
            draw_estimates(axes, estimates, "-o", color, f"held-out, {name}")
        axes.set_xlabel("policy version (PPO updates)")
