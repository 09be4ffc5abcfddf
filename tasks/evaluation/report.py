"""A run's history as numbers, a table and a picture."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from tasks.evaluation.history import Evaluation, History, Iteration
from tasks.evaluation.outcomes import Outcome, summarise
from tasks.evaluation.statistics import paired_difference

if TYPE_CHECKING:
    from rich.table import Table

Row = dict[str, str]


def summary(history: History) -> dict[str, Any]:
    """Everything the report says, as JSON-ready numbers."""
    evaluations = [
        {"policy_version": evaluation.policy_version} | summarise(evaluation.outcomes)
        for evaluation in history.evaluations
    ]
    result: dict[str, Any] = {
        "run": history.name,
        "iterations": len(history.iterations),
        "evaluations": evaluations,
        "stages": _stages(history.iterations),
        "training": [
            {"iteration": iteration.number} | iteration.rollout | iteration.train for iteration in history.iterations
        ],
    }
    if len(history.evaluations) > 1:
        result["improvement"] = _improvement(history.evaluations[0], history.evaluations[-1])
    return result


def _improvement(before: Evaluation, after: Evaluation) -> dict[str, Any]:
    """Paired differences on the same problems, last evaluation against the first."""

    def by_problem(outcomes: Sequence[Outcome], name: str) -> list[float]:
        samples: dict[str, list[float]] = {}
        for outcome in outcomes:
            samples.setdefault(outcome.problem_id, []).append(getattr(outcome, name))
        return [fmean(values) for _, values in sorted(samples.items())]

    return {
        key: paired_difference(by_problem(before.outcomes, name), by_problem(after.outcomes, name)).as_dict()
        for key, name in (("first_turn", "first"), ("any_turn", "any"))
    }


def _stages(iterations: Sequence[Iteration]) -> dict[str, dict[str, float]]:
    """Mean seconds of each stage's own work, tokens per second, and the mean staleness of what was trained on."""
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


def accuracy_rows(numbers: dict[str, Any]) -> list[Row]:
    """Accuracy before and after, with 95 % intervals; one row each for first turn, any turn and every turn."""
    evaluations = numbers["evaluations"]
    if not evaluations:
        return []
    before, after = evaluations[0], evaluations[-1]
    rows = [
        _accuracy_row(label, before[key], after[key], numbers.get("improvement", {}).get(key)) for label, key in _LINES
    ]
    for turn in range(max(len(before["by_turn"]), len(after["by_turn"]))):
        cells = [_at(evaluation["by_turn"], turn) for evaluation in (before, after)]
        rows.append(_accuracy_row(f"turn {turn + 1}, where reached", cells[0], cells[1], None))
    return rows


_LINES = (("first turn", "first_turn"), ("any turn", "any_turn"))


def _accuracy_row(label: str, before: Any, after: Any, difference: Any) -> Row:
    return {
        "held-out accuracy": label,
        "before": _estimate(before),
        "after": _estimate(after),
        "difference": _estimate(difference, "+"),
    }


def _at(values: Sequence[Any], index: int) -> Any:
    return values[index] if index < len(values) else None


def _estimate(estimate: dict[str, float] | None, sign: str = "") -> str:
    if estimate is None:
        return ""
    return f"{estimate['value']:{sign}.3f} [{estimate['low']:{sign}.3f}, {estimate['high']:{sign}.3f}]"


def stage_rows(numbers: dict[str, Any]) -> list[Row]:
    """Mean seconds of an iteration, tokens/s and staleness by stage."""
    return [
        {
            "stage": stage,
            "seconds an iteration": f"{values['seconds']:.2f}",
            "tokens/s": f"{values['tokens_per_second']:.0f}" if "tokens_per_second" in values else "",
            "staleness": f"{values['staleness']:.2f}" if "staleness" in values else "",
        }
        for stage, values in numbers["stages"].items()
    ]


def table(title: str, rows: Sequence[Row]) -> "Table":
    """Rows for the terminal."""
    from rich.table import Table

    result = Table(title=title, title_justify="left")
    for column in rows[0] if rows else ():
        result.add_column(column)
    for row in rows:
        result.add_row(*row.values())
    return result


def plot(history: History, path: Path) -> None:
    """Held-out accuracy with intervals, and the success of the training episodes, over the iterations."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    sampled = [
        (i.number, i.rollout["success"][0], i.rollout["solved"]) for i in history.iterations if i.rollout["success"]
    ]
    if sampled:
        numbers, first, solved = zip(*sampled, strict=True)
        axes.plot(
            numbers, first, color="tab:blue", alpha=0.35, linewidth=1, label="training episodes, first turn (sampled)"
        )
        axes.plot(
            numbers, solved, color="tab:orange", alpha=0.35, linewidth=1, label="training episodes, any turn (sampled)"
        )
    for key, name, color in (("first_turn", "first turn", "tab:blue"), ("any_turn", "any turn", "tab:orange")):
        points = [(e.policy_version, summarise(e.outcomes)[key]) for e in history.evaluations]
        if points:
            versions = [version for version, _ in points]
            values = [point["value"] for _, point in points]
            spread = [[p["value"] - p["low"] for _, p in points], [p["high"] - p["value"] for _, p in points]]
            axes.errorbar(versions, values, yerr=spread, marker="o", capsize=3, color=color, label=f"held-out, {name}")
    axes.set(xlabel="policy version (PPO updates)", ylabel="accuracy", ylim=(0, 1), title=f"Run {history.name}")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=150)
