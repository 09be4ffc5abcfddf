"""Reports: a night as Markdown, and the timeline of nights and champions with their accuracies, as rows and a plot."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from configs import Config
from storage import layout
from storage.logs.nights import Nights, Record
from storage.objects.store import Store
from storage.versions import aliases, manifests
from storage.versions.aliases import Move
from tasks.evaluate.summary import comparison_rows
from tasks.retrain.gate import measured

Estimate = dict[str, float]
"""An accuracy and its interval: value, low, high."""
Numbers = Mapping[str, Any]
"""The numbers of a gate's decision."""


_HEADLINES = {
    "promoted": "Night {number}: promoted. The champion is now `{challenger}`",
    "rejected": "Night {number}: rejected. The champion stays `{champion}`",
    "overtaken": "Night {number}: not promoted, since another writer moved the champion meanwhile",
    "given up": "Night {number}: given up by hand",
}


@dataclass(frozen=True, slots=True)
class Event:
    """A move of the champion's alias, or a night that did not move it.

    Example: Event("night 3", "rejected", champion="runs/nightly-0002/checkpoints/000030", accuracy={…}, …)
    """

    label: str
    what: str  # the outcome of a night, or the reason of the move
    champion: str  # the champion after the event
    accuracy: Estimate | None  # the champion's accuracy on the gate's target; None if no night has measured it
    challenger: str | None = None  # the challenger of a night that was not promoted
    challenged: Estimate | None = None  # its accuracy
    level: float | None = None  # the largest p with which the night's gate would promote; None in older decisions


def read_timeline(store: Store, config: Config) -> list[Event]:
    """Read all moves of the champion's alias, each followed by the nights that ended without moving it.

    The numbers in both logs decide the order, not the clocks.
    """
    records = Nights(store, config.run.name).read()
    moves = aliases.history(store, config.retrain.champion)
    decisions = _decisions(store, records)
    accuracies = _accuracies(config, decisions.values())
    events, promoting = list[Event](), _promoting_nights(records)
    for move in moves:
        events.append(_move_event(move, promoting.pop(move.version, None), accuracies, decisions))
        ended = [r for r in records if r.end and r.end.move == move.number]
        events += [_night_event(r, move, accuracies, decisions) for r in ended if r.end and r.end.outcome != "promoted"]
    return events


def _promoting_nights(records: Sequence[Record]) -> dict[str, int]:
    """Map each promoted challenger to the night that promoted it."""
    ended = [(record.end, record.night.number) for record in records if record.end]
    return {end.challenger: number for end, number in ended if end.challenger and end.outcome == "promoted"}


def _move_event(
    move: Move, night: int | None, accuracies: Mapping[str, Estimate], decisions: Mapping[int, Numbers]
) -> Event:
    """Make the event of a move, which `night` made, or a user."""
    label = f"night {night}" if night else "first" if move.number == 0 else f"move {move.number}"
    level = decisions[night].get("level") if night else None
    return Event(label, "promoted" if night else move.reason, move.version, accuracies.get(move.version), level=level)


def _night_event(
    record: Record, move: Move, accuracies: Mapping[str, Estimate], decisions: Mapping[int, Numbers]
) -> Event:
    assert record.end
    challenger = record.end.challenger
    return Event(
        f"night {record.night.number}",
        record.end.outcome,
        move.version,
        accuracies.get(move.version),
        challenger,
        accuracies.get(challenger or ""),
        decisions.get(record.night.number, {}).get("level"),
    )


def _decisions(store: Store, records: Sequence[Record]) -> dict[int, Numbers]:
    """Read the numbers of the decisions by night; a night that was given up has none."""
    ended = [(record.night.number, record.end.decision) for record in records if record.end]
    return {number: manifests.read(store, decision).metrics for number, decision in ended if decision}


def _accuracies(config: Config, decisions: Iterable[Numbers]) -> dict[str, Estimate]:
    """Return the accuracies on the gate's target by checkpoint, from the decisions of all nights."""
    gate, accuracies = config.retrain.gate, dict[str, Estimate]()
    for decision in decisions:
        for policy, sets in decision["accuracy"].items():
            numbers = sets.get(gate.target, {})
            if gate.episodes == "sampled":
                numbers = numbers.get("sampled", {})
            if gate.measure in numbers:
                accuracies[policy] = numbers[gate.measure]
    return accuracies


def timeline_rows(events: Sequence[Event]) -> list[dict[str, str]]:
    """Make a table for the terminal and for artifacts."""
    return [
        {
            "": event.label,
            "what": event.what,
            "champion": event.champion,
            "accuracy": _format(event.accuracy),
            "challenger, not promoted": event.challenger or "",
            "its accuracy": _format(event.challenged),
            "p at most": "" if event.level is None else f"{event.level:.2g}",
        }
        for event in events
    ]


def _format(estimate: Mapping[str, Any] | None) -> str:
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]" if estimate else ""


def write_timeline(store: Store, config: Config) -> list[Event]:
    """Write nights.json and champion.png to the report folder of the retraining; return the events that they show."""
    gate, events = config.retrain.gate, read_timeline(store, config)
    with TemporaryDirectory(prefix="report-") as scratch:
        numbers, picture = Path(scratch) / "nights.json", Path(scratch) / "champion.png"
        numbers.write_text(json.dumps([asdict(event) for event in events], indent=1))
        plot(events, f"{gate.target}, {measured(gate)}", picture)
        for path in (numbers, picture):
            store.put(f"{layout.retraining(config.run.name)}/report/{path.name}", path)
    return events


def plot(events: Sequence[Event], measure: str, path: Path) -> None:
    """Plot the champion's accuracy after each event, and the challengers that were not promoted, with intervals."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 0.9 * len(events)), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, color, line, values in (
        ("champion", "tab:blue", "-o", [event.accuracy for event in events]),
        ("challenger, not promoted", "tab:red", "x", [event.challenged for event in events]),
    ):
        points = [(index, estimate) for index, estimate in enumerate(values) if estimate]
        if points:
            heights = [estimate["value"] for _, estimate in points]
            spread = [[e["value"] - e["low"] for _, e in points], [e["high"] - e["value"] for _, e in points]]
            axes.errorbar(
                [index for index, _ in points], heights, yerr=spread, fmt=line, color=color, capsize=3, label=name
            )
    labels = [f"{event.label}\n{event.what}" for event in events]
    axes.set_xticks(range(len(events)), labels, rotation=30, ha="right", fontsize=8)
    axes.set(ylabel=f"accuracy on {measure}", ylim=(0, 1), title="Champion over nights")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=150)


def night_markdown(store: Store, config: Config, record: Record, decision: Mapping[str, Any]) -> str:
    """Write the report of a night that ended: decision and reasons, numbers, versions, and how to undo it."""
    night, end = record.night, record.end
    assert end
    names = {"number": night.number, "challenger": decision["challenger"], "champion": decision["champion"]}
    counts = ", ".join(f"{count} {name}" for name, count in night.counts.items())
    training = decision["training"]
    parts = [
        f"# {_HEADLINES[end.outcome].format(**names)}",
        f"Began {night.at}, ended {end.at}. Problems: {counts}. Trained {len(training['solved'])} iterations on "
        f"{training['tokens']:,} sampled tokens.",
        "## Why",
        markdown_table(check_rows(decision)),
    ]
    for name, comparison in decision["comparisons"].items():
        parts += [f"## {name}: champion and challenger", markdown_table(comparison_rows(comparison))]
    parts += ["## Where", markdown_table(_places(store, record)), *_next_steps(config, record)]
    return "\n\n".join(parts)


def check_rows(decision: Mapping[str, Any]) -> list[dict[str, str]]:
    """Make a table of the gate's checks, failed checks first."""
    ordered = sorted(decision["checks"], key=lambda check: check["passed"])
    return [
        {
            "": "ok" if check["passed"] else "NO",
            "demand": f"{'no alarm' if check['kind'] == 'alarm' else check['kind']}: {check['subject']}",
            "found": check["says"],
        }
        for check in ordered
    ]


def alarms(decision: Mapping[str, Any]) -> list[str]:
    """List the texts of the alarms that the night raised."""
    failed = [check for check in decision["checks"] if check["kind"] == "alarm" and not check["passed"]]
    return [f"{check['subject']}: {check['says']}" for check in failed]


def markdown_table(rows: list[dict[str, str]]) -> str:
    """Format rows as a Markdown table; bars in cells are escaped."""
    if not rows:
        return "(none)"
    lines = [
        list(rows[0]),
        ["---"] * len(rows[0]),
        *([cell.replace("|", "\\|") for cell in row.values()] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _places(store: Store, record: Record) -> list[dict[str, str]]:
    night, end = record.night, record.end
    assert end
    versions = {
        "decision": end.decision,
        "challenger": end.challenger,
        "problems it trained on": night.problems,
        "new and waiting ones": night.fresh,
        "accepted problems": end.accepted,
        "waiting problems": end.waiting,
    }
    return [{"what": what, "version": store.uri(version)} for what, version in versions.items() if version]


def _next_steps(config: Config, record: Record) -> list[str]:
    assert record.end
    root, challenger = config.storage.root, record.end.challenger
    if record.end.outcome == "promoted":
        return [f"To undo it: `python -m flows.retrain CONFIG --roll-back`. Or: `python -m storage --root {root} alias "
                f"rollback {config.retrain.champion}`"]  # fmt: skip
    return [f"To study the challenger: `python -m storage --root {root} lineage {challenger}`"]
