"""The learning curve of a run: its committed iterations and evaluations, their numbers, and a plot of them."""

from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

from configs import Config
from configs.evaluate import HELD_OUT
from storage import layout
from storage.grouping import grouped
from storage.objects.store import Store
from storage.version_names import ProblemsVersion, ScoresVersion
from tasks.evaluate.outcomes import Outcome, by_source, compare, read_outcomes, summarise
from tasks.evaluate.protocol import greedy
from tasks.evaluate.statistics import proportion
from tasks.metrics.log import read_rows
from tasks.metrics.rows import Row, by_iteration, spent
from tasks.metrics.show import draw_estimates, plotted


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
    iterations: list[Row]  # merged rows, see `by_iteration`
    evaluations: list[Evaluation]  # ordered by policy version


def read_learning_curve(
    store: Store, config: Config, scorer: str, held_out: ProblemsVersion, cache: Path
) -> LearningCurve:
    """Read the metrics of a run's whole iterations, and the outcomes of its greedy evaluations on `held_out`.

    Use the scores of the verifier with fingerprint `scorer`, or else the newest scores of another verifier.
    """
    name, rows = config.run.name, read_rows(store, config.run.name)
    merged, evaluated = by_iteration(rows), [row["version"] for row in rows if row["stage"] == "evaluate"]
    graded = grouped((each.evaluation, each) for each in map(ScoresVersion, evaluated))
    whole = takewhile(lambda number: merged.get(number, {}).get("stage") == "train", range(config.run.iterations))
    done = [merged[number] for number in whole]  # the run will continue after these
    protocols = [greedy(config, HELD_OUT, held_out, with_code=known) for known in (True, False)]
    evaluations = list[Evaluation]()
    for number in range(len(done) + 1):
        named = (protocol.evaluation(layout.checkpoint(name, number)) for protocol in protocols)
        if played := next((version for version in named if version in graded), None):
            preferred = layout.evaluation_scores(played, scorer)
            scores = preferred if preferred in graded[played] else graded[played][-1]
            evaluations.append(Evaluation(number, scores, read_outcomes(store, played, scores, cache)))
    return LearningCurve(name, done, evaluations)


def summary(curve: LearningCurve) -> dict[str, Any]:
    """Compute all numbers of the report, JSON-ready."""
    result: dict[str, Any] = {
        "run": curve.name,
        "iterations": len(curve.iterations),
        "evaluations": [{"policy_version": of.policy_version} | summarise(of.outcomes) for of in curve.evaluations],
        "stages": _stages(curve.iterations),
        "training": curve.iterations,
    }
    if len(curve.evaluations) > 1:  # the paired differences between the last and the first, on the same problems
        comparison = compare(curve.evaluations[0].outcomes, curve.evaluations[-1].outcomes)
        result["improvement"] = _differences(comparison)
        of_each = {source: _differences(own) for source, own in comparison["by_source"].items()}
        result["improvement_by_source"] = of_each
    return result


def _differences(comparison: dict[str, Any]) -> dict[str, Any]:
    measures = [key for key in ("first_turn", "any_turn", "return") if comparison[key]]
    return {key: comparison[key]["difference"] for key in measures}


def _stages(iterations: list[Row]) -> dict[str, dict[str, float]]:
    """Compute the mean seconds of each stage's own work, tokens per second, and the mean staleness in training."""
    stages = dict[str, dict[str, float]]()
    for each in spent(iterations):
        rate = {"tokens_per_second": each.per_second} if each.tokens else {}
        stages[each.stage] = {"seconds": fmean(each.seconds)} | rate
    staleness = [row["staleness/mean"] for row in iterations if "staleness/mean" in row]
    if "train" in stages and staleness:
        stages["train"]["staleness"] = fmean(staleness)
    return stages


def plot(curve: LearningCurve, path: Path) -> None:
    """Plot held-out accuracy with intervals, and the success of the training episodes, over the iterations."""
    played = [row for row in curve.iterations if "success/turn_1" in row]
    with plotted(path, 8, "accuracy", f"Run {curve.name}") as axes:
        for name, measure, color, metric in (
            ("first turn", "first", "tab:blue", "success/turn_1"),
            ("any turn", "any", "tab:orange", "success/any_turn"),
        ):
            if played:
                label, numbers = f"training episodes, {name} (sampled)", [row["iteration"] for row in played]
                axes.plot(numbers, [row[metric] for row in played], color=color, alpha=0.35, linewidth=1, label=label)
            estimates = {
                each.policy_version: proportion([getattr(outcome, measure) for outcome in each.outcomes])._asdict()
                for each in curve.evaluations
            }
            draw_estimates(axes, estimates, "-o", color, f"held-out, {name}")
        sources = sorted({source for each in curve.evaluations for source in by_source(each.outcomes)})
        for number, source in enumerate(sources, 2):  # the first two colours are taken
            of_each = {each.policy_version: by_source(each.outcomes)[source] for each in curve.evaluations}
            estimates = {version: proportion([one.any for one in own])._asdict() for version, own in of_each.items()}
            draw_estimates(axes, estimates, "--o", f"C{number}", f"held-out, any turn, {source}")
        axes.set_xlabel("policy version (PPO updates)")
