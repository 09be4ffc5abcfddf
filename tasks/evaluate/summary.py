"""Tables for people: accuracies, comparisons, seconds of stages."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.table import Table

from storage.commands import program
from storage.visible import printable

Cells = dict[str, str]
_WIDTH = 150


def accuracy_rows(numbers: dict[str, Any]) -> list[Cells]:
    """Make a table of accuracies before and after, with 95 % intervals: rows for first turn, any turn and each turn.

    If tools were called, two more rows have the share of episodes with a call and the share of calls that failed. If
    rewards are more than successes, more rows have the mean return of an episode and the parts of rewards. The last
    rows have the accuracies and returns by source, if there are several.
    """
    evaluations = numbers["evaluations"]
    if not evaluations:
        return []
    before, after = (_accuracies(each) for each in (evaluations[0], evaluations[-1]))
    improvement = numbers.get("improvement", {})
    differences = {label: improvement.get(key) for label, key in _MEASURES.items()}
    for source, own in numbers.get("improvement_by_source", {}).items():
        differences |= {f"{source}: {label}": own.get(key) for label, key in _MEASURES.items()}
    return [
        {
            "held-out accuracy": label,
            "before": estimated(before.get(label)),
            "after": estimated(after.get(label)),
            "difference": estimated(differences.get(label), "+"),
        }
        for label in before | after
    ]


_LINES = {"first turn": "first_turn", "any turn": "any_turn"}
_MEASURES = {**_LINES, "return": "return"}
_BY_SOURCE = (*_MEASURES, "first turn, sampled", "pass@1, any turn")
_CALLS = {"episodes with a call": "called", "failed calls": "calls_failed"}


def _accuracies(numbers: dict[str, Any]) -> dict[str, Mapping[str, float] | None]:
    """Return the accuracies and rewards of an evaluation by their labels, of whatever it has, and shares of calls."""
    lines = {label: numbers[key] for label, key in _LINES.items()}
    if "sampled" in numbers:  # only the first turn: for any turn it equals pass@1
        lines["first turn, sampled"] = numbers["sampled"]["first_turn"]
    lines |= {f"turn {turn}, where reached": value for turn, value in enumerate(numbers["by_turn"], 1)}
    lines |= {f"pass@{k}, any turn": value for k, value in numbers.get("pass_at", {}).items()}
    if numbers.get("calls_failed"):  # None: there was no call; older evaluations have no key
        lines |= {label: numbers[key] for label, key in _CALLS.items()}
    lines |= numbers.get("rewards", {})
    for source, own in numbers.get("by_source", {}).items():
        values = _accuracies(own)
        lines |= {f"{source}: {label}": values[label] for label in values if label in _BY_SOURCE}
    return lines


def _number(value: float) -> str:
    """Write a share with three decimals, a number of tokens with one."""
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def estimated(estimate: Mapping[str, float] | None, sign: str = "") -> str:
    """Format an estimate with its interval.

    Example: "0.478 [0.410, 0.547]", or with the sign + "+0.131 [+0.076, +0.183]".
    """
    if estimate is None:
        return ""
    return f"{estimate['value']:{sign}.3f} [{estimate['low']:{sign}.3f}, {estimate['high']:{sign}.3f}]"


def evaluation_rows(numbers: dict[str, Any]) -> list[Cells]:
    """Make a table of one evaluation, given the numbers of `summarise`; a cell without observations is empty."""
    lines = _accuracies(numbers) | {label: numbers[key] for label, key in _BEHAVIOUR.items()}
    return [
        {
            "measure": label,
            "value": _number(value["value"]) if value else "",
            "95 % interval": f"[{value['low']:.3f}, {value['high']:.3f}]" if value else "",
        }
        for label, value in lines.items()
    ]


_BEHAVIOUR = {
    "fix rate (wrong, then right)": "fix_rate",
    "break rate (right, then wrong)": "break_rate",
    "truncated episodes": "truncated",
    "failed verdicts": "failed_verdicts",
    "tokens of an answer": "answer_tokens",
}


def comparison_rows(comparison: dict[str, Any]) -> list[Cells]:
    """Make a table of the result of `compare`. Fixed: problems solved only after; broken: solved only before."""
    tokens, truncated = comparison["answer_tokens"], comparison["truncated"]
    lines: list[tuple[str, dict[str, Any], str | None]]
    lines = [(label, comparison[key], None) for label, key in _MEASURES.items() if comparison.get(key)]
    for source, own in comparison.get("by_source", {}).items():
        lines += [(f"{source}: {label}", own[key], None) for label, key in _MEASURES.items() if own[key]]
    lines.append(("truncated episodes", truncated, f"{truncated['after'] - truncated['before']:+.3f}"))
    lines.append(("tokens of an answer", tokens, "" if tokens["ratio"] is None else f"{tokens['ratio']:.2f} times"))
    return [
        {
            "measure": label,
            **{key: "" if values[key] is None else _number(values[key]) for key in ("before", "after")},
            "difference": estimated(values["difference"], "+") if difference is None else difference,
            "p": "" if values.get("p") is None else f"{values['p']:.3g}",  # None: stored by an older program
            "fixed / broken": (  # of problems with one episode
                "" if values.get("only_after") is None else f"{values['only_after']} / {values['only_before']}"
            ),
        }
        for label, values, difference in lines
    ]


def stage_rows(numbers: dict[str, Any]) -> list[Cells]:
    """Make a table of mean seconds of an iteration, tokens/s and staleness by stage; the rest, where known, is one."""
    return [
        {
            "stage": stage,
            "seconds an iteration": f"{values['seconds']:.2f}",
            "tokens/s": f"{values['tokens_per_second']:.0f}" if "tokens_per_second" in values else "",
            "staleness": f"{values['staleness']:.2f}" if "staleness" in values else "",
        }
        for stage, values in numbers["stages"].items()
    ]


def table(title: str, rows: Sequence[Cells]) -> Table:
    """Make a table for the terminal; markup in its texts is not interpreted, and they cannot move the cursor."""
    return program.table(list(rows[0]) if rows else [], [list(row.values()) for row in rows], title, HEAVY_HEAD)


def rendered(*parts: Table | str) -> str:
    """Render tables and lines as one text."""
    text = io.StringIO()
    console = Console(file=text, width=_WIDTH, highlight=False)
    for part in parts:
        console.print(printable(part) if isinstance(part, str) else part, markup=False)
    return text.getvalue()
