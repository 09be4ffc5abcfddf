"""Nights and champions in order: what happened, with which accuracy, as rows and as a picture."""

import json
from collections.abc import Mapping, Sequence
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
from tasks.retrain.gate import measured

Estimate = dict[str, float]
"""value, low, high"""


@dataclass(frozen=True, slots=True)
class Event:
    """A move of the champion's alias, or a night that left it where it was.

    Example: Event("night 3", "rejected", champion="runs/nightly-0002/checkpoints/000030", accuracy={…}, …)
    """

    label: str
    what: str  # an outcome of a night, or why the alias was moved
    champion: str  # afterwards
    accuracy: Estimate | None  # of the champion, on the gate's target; None where no night has measured it
    challenger: str | None = None  # of a night that was not promoted
    challenged: Estimate | None = None


def read_timeline(store: Store, config: Config) -> list[Event]:
    """All moves of the champion's alias, each followed by the nights that ended without moving it.

    Ordered by the numbers in both logs, whatever the clocks said.
    """
    records = Nights(store, config.run.name).read()
    moves = aliases.history(store, config.retrain.champion)
    accuracies = _accuracies(store, config, records)
    events, made = list[Event](), _made(records)
    for move in moves:
        events.append(_moved(move, made.pop(move.version, None), accuracies))
        ended = [each for each in records if each.end and each.end.move == move.number]
        events += [_stayed(each, move, accuracies) for each in ended if each.end and each.end.outcome != "promoted"]
    return events


def _made(records: Sequence[Record]) -> dict[str, int]:
    """By challenger the night that promoted it."""
    ended = [(record.end, record.night.number) for record in records if record.end]
    return {end.challenger: number for end, number in ended if end.challenger and end.outcome == "promoted"}


def _moved(move: Move, night: int | None, accuracies: Mapping[str, Estimate]) -> Event:
    """By a night's promotion, or by hand."""
    label = f"night {night}" if night else "first" if move.number == 0 else f"move {move.number}"
    return Event(label, "promoted" if night else move.reason, move.version, accuracies.get(move.version))


def _stayed(record: Record, move: Move, accuracies: Mapping[str, Estimate]) -> Event:
    assert record.end
    challenger = record.end.challenger
    return Event(
        f"night {record.night.number}",
        record.end.outcome,
        move.version,
        accuracies.get(move.version),
        challenger,
        accuracies.get(challenger or ""),
    )


def _accuracies(store: Store, config: Config, records: Sequence[Record]) -> dict[str, Estimate]:
    """By policy version the accuracy on the gate's target, from the decisions of all nights."""
    gate, found = config.retrain.gate, dict[str, Estimate]()
    for record in records:
        if record.end and record.end.decision:
            for policy, sets in manifests.read(store, record.end.decision).metrics["accuracy"].items():
                numbers = sets.get(gate.target, {})
                if gate.episodes == "sampled":
                    numbers = numbers.get("sampled", {})
                if gate.measure in numbers:
                    found[policy] = numbers[gate.measure]
    return found


def timeline_rows(events: Sequence[Event]) -> list[dict[str, str]]:
    """For the terminal and for artifacts."""
    return [
        {
            "": event.label,
            "what": event.what,
            "champion": event.champion,
            "accuracy": _shown(event.accuracy),
            "challenger, not promoted": event.challenger or "",
            "its accuracy": _shown(event.challenged),
        }
        for event in events
    ]


def _shown(estimate: Mapping[str, Any] | None) -> str:
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]" if estimate else ""


def write_timeline(store: Store, config: Config) -> list[Event]:
    """Write nights.json and champion.png in the report's folder beside the log of nights; returns what they show."""
    gate, events = config.retrain.gate, read_timeline(store, config)
    with TemporaryDirectory(prefix="report-") as scratch:
        numbers, picture = Path(scratch) / "nights.json", Path(scratch) / "champion.png"
        numbers.write_text(json.dumps([asdict(event) for event in events], indent=1))
        plot(events, f"{gate.target}, {measured(gate)}", picture)
        for path in (numbers, picture):
            store.put(f"{layout.retraining(config.run.name)}/report/{path.name}", path)
    return events


def plot(events: Sequence[Event], measure: str, path: Path) -> None:
    """The champion's accuracy after each event, and the challengers that were not promoted, with intervals."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 0.9 * len(events)), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, color, line, values in (
        ("champion", "tab:blue", "-o", [event.accuracy for event in events]),
        ("challenger, not promoted", "tab:red", "x", [event.challenged for event in events]),
    ):
        points = [(place, estimate) for place, estimate in enumerate(values) if estimate]
        if points:
            heights = [estimate["value"] for _, estimate in points]
            spread = [[e["value"] - e["low"] for _, e in points], [e["high"] - e["value"] for _, e in points]]
            axes.errorbar(
                [place for place, _ in points], heights, yerr=spread, fmt=line, color=color, capsize=3, label=name
            )
    labels = [f"{event.label}\n{event.what}" for event in events]
    axes.set_xticks(range(len(events)), labels, rotation=30, ha="right", fontsize=8)
    axes.set(ylabel=f"accuracy on {measure}", ylim=(0, 1), title="Champion over nights")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=150)
