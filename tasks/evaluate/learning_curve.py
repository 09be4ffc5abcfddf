"""The learning curve of a run: the numbers of its committed iterations and evaluations, and a plot of them."""

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from configs import Config
from configs.evaluate import HELD_OUT
from storage import layout
from storage.grouping import grouped
from storage.objects.store import Store
from storage.version_names import ProblemsVersion, ScoresVersion
from tasks.evaluate.outcomes import Outcome, compare, read_outcomes, summary_of
from tasks.evaluate.protocol import greedy
from tasks.metrics.log import read_rows
from tasks.metrics.rows import by_iteration, spent
from tasks.metrics.show import draw_estimates


def summary(store: Store, config: Config, scorer: str, held_out: ProblemsVersion, cache: Path) -> dict[str, Any]:
    """Read all numbers of a run's report, JSON-ready: its whole iterations, its greedy evaluations on `held_out`, and
    the differences between the last evaluation and the first.

    Use the scores of the verifier with fingerprint `scorer`, or else the newest scores of another verifier.
    """
    name, rows = config.run.name, read_rows(store, config.run.name)
    merged, evaluated = by_iteration(rows), [row["version"] for row in rows if row["stage"] == "evaluate"]
    graded = grouped((each.evaluation, each) for each in map(ScoresVersion, evaluated))
    whole = takewhile(lambda number: merged.get(number, {}).get("stage") == "train", range(config.run.iterations))
    iterations = [merged[number] for number in whole]  # the run will continue after these
    protocol, chosen = greedy(config, HELD_OUT, held_out), dict[int, ScoresVersion]()
    for number in range(len(iterations) + 1):
        if of_version := graded.get(played := protocol.evaluation(layout.checkpoint(name, number))):
            preferred = layout.evaluation_scores(played, scorer)
            chosen[number] = preferred if preferred in of_version else of_version[-1]
    differences = dict[str, Any]()
    if len(chosen) > 1:
        first, *_, last = chosen.values()
        differences = improvement(read_outcomes(store, first, cache), read_outcomes(store, last, cache))
    return {
        "run": name,
        "iterations": len(iterations),
        "evaluations": [{"policy_version": number} | summary_of(store, [each]) for number, each in chosen.items()],
        "stages": spent(iterations),
        "training": iterations,
        **differences,
    }


def improvement(first: Sequence[Outcome], last: Sequence[Outcome]) -> dict[str, Any]:
    """Return the paired differences between two evaluations on the same problems, of all and of each source."""
    comparison = compare(first, last)
    of_each = {source: _differences(own) for source, own in comparison["by_source"].items()}
    return {"improvement": _differences(comparison), "improvement_by_source": of_each}


def _differences(comparison: dict[str, Any]) -> dict[str, Any]:
    measures = [key for key in ("first_turn", "any_turn", "return") if comparison[key]]
    return {key: comparison[key]["difference"] for key in measures}


def plot(numbers: dict[str, Any], path: Path) -> None:
    """Plot a summary: held-out accuracy with intervals, and the success of training episodes, over the iterations."""
    from matplotlib.figure import Figure

    played = [row for row in numbers["training"] if "success/turn_1" in row]
    evaluations = {each["policy_version"]: each for each in numbers["evaluations"]}
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, measure, color, metric in (
        ("first turn", "first_turn", "tab:blue", "success/turn_1"),
        ("any turn", "any_turn", "tab:orange", "success/any_turn"),
    ):
        if played:
            label, places = f"training episodes, {name} (sampled)", [row["iteration"] for row in played]
            axes.plot(places, [row[metric] for row in played], color=color, alpha=0.35, linewidth=1, label=label)
        estimates = {version: each[measure] for version, each in evaluations.items()}
        draw_estimates(axes, estimates, "-o", color, f"held-out, {name}")
    sources = sorted({source for each in evaluations.values() for source in each.get("by_source", ())})
    for number, source in enumerate(sources, 2):  # the first two colours are taken
        of_source = {version: each.get("by_source", {}).get(source) for version, each in evaluations.items()}
        estimates = {version: own["any_turn"] for version, own in of_source.items() if own}
        draw_estimates(axes, estimates, "--o", f"C{number}", f"held-out, any turn, {source}")
    axes.set(xlabel="policy version (PPO updates)", ylabel="accuracy", ylim=(0, 1), title=f"Run {numbers['run']}")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=150)
