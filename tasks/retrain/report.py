"""Reports: a night as Markdown, and the timeline of nights and champions with their accuracies, as rows and a plot."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from configs import Config
from storage import layout
from storage.logs.nights import Nights, Record
from storage.objects.store import Store
from storage.processes.folder import TemporaryFolder
from storage.versions import aliases, manifests
from tasks.evaluate.summary import comparison_rows, estimated
from tasks.metrics.show import draw_estimates, plotted
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

    The events are ordered by the numbers in both logs, not by clocks.
    """
    ended = [(record.night.number, record.end) for record in Nights(store, config.run.name).read() if record.end]
    decisions = {night: manifests.read(store, end.decision).metrics for night, end in ended if end.decision}
    accuracies = _accuracies(config, decisions.values())
    promoting = {str(end.challenger): night for night, end in ended if end.outcome == "promoted"}
    events = list[Event]()
    for move in aliases.history(store, config.retrain.champion):
        accuracy, promoted = accuracies.get(move.version), promoting.pop(move.version, None)
        label = f"night {promoted}" if promoted else "first" if move.number == 0 else f"move {move.number}"
        level = decisions[promoted].get("level") if promoted else None
        events.append(Event(label, "promoted" if promoted else move.reason, move.version, accuracy, level=level))
        for night, end in ended:
            if end.move == move.number and end.outcome != "promoted":
                challenged, level = accuracies.get(end.challenger or ""), decisions.get(night, {}).get("level")
                event = Event(f"night {night}", end.outcome, move.version, accuracy, end.challenger, challenged, level)
                events.append(event)
    return events


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
            "accuracy": estimated(event.accuracy),
            "challenger, not promoted": event.challenger or "",
            "its accuracy": estimated(event.challenged),
            "p at most": "" if event.level is None else f"{event.level:.2g}",
        }
        for event in events
    ]


def write_timeline(store: Store, config: Config) -> list[Event]:
    """Write nights.json and champion.png to the report folder of the retraining; return the events that they show."""
    gate, events = config.retrain.gate, read_timeline(store, config)
    folder = f"{layout.retraining(config.run.name)}/report"
    with TemporaryFolder() as scratch:
        picture = scratch / "champion.png"
        plot(events, f"{gate.target}, {measured(gate)}", picture)
        store.put(f"{folder}/{picture.name}", picture)
    store.write(f"{folder}/nights.json", json.dumps([asdict(event) for event in events], indent=1).encode())
    return events


def plot(events: Sequence[Event], measure: str, path: Path) -> None:
    """Plot the champion's accuracy after each event, and the challengers that were not promoted, with intervals."""
    with plotted(path, max(6.0, 0.9 * len(events)), f"accuracy on {measure}", "Champion over nights") as axes:
        champions = {index: event.accuracy for index, event in enumerate(events) if event.accuracy}
        draw_estimates(axes, champions, "-o", "tab:blue", "champion")
        challengers = {index: event.challenged for index, event in enumerate(events) if event.challenged}
        draw_estimates(axes, challengers, "x", "tab:red", "challenger, not promoted")
        labels = [f"{event.label}\n{event.what}" for event in events]
        axes.set_xticks(range(len(events)), labels, rotation=30, ha="right", fontsize=8)


def night_markdown(store: Store, config: Config, record: Record) -> str:
    """Write the report of a night: decision and reasons, numbers, versions, and how to undo it."""
    night, end = record.night, record.end
    if end is None:
        return f"# Night {night.number} began {night.at} and has not ended: the next flow run continues it"
    decision = manifests.read(store, end.decision).metrics if end.decision else {}
    headline = _HEADLINES[end.outcome].format(number=night.number, **decision)
    if not decision:
        return f"# {headline}"
    counts = ", ".join(f"{count} {name}" for name, count in night.counts.items())
    training = decision["training"]
    trained = f"Trained {len(training['solved'])} iterations on {training['tokens']:,} sampled tokens."
    about = f"Began {night.at}, ended {end.at}. Problems: {counts}. {trained}"
    parts = [f"# {headline}", about, "## Why", markdown_table(check_rows(decision))]
    for name, comparison in decision["comparisons"].items():
        parts += [f"## {name}: champion and challenger", markdown_table(comparison_rows(comparison))]
    versions = {
        "decision": end.decision,
        "challenger": end.challenger,
        "problems it trained on": night.problems,
        "new and waiting ones": night.fresh,
        "accepted problems": end.accepted,
        "waiting problems": end.waiting,
    }
    rows = [{"what": what, "version": store.uri(version)} for what, version in versions.items() if version]
    root, alias = config.storage.root, config.retrain.champion
    undo = f"`python -m flows.retrain CONFIG --roll-back`. Or: `python -m storage --root {root} alias rollback {alias}`"
    study = f"To study the challenger: `python -m storage --root {root} lineage {end.challenger}`"
    next_step = f"To undo it: {undo}" if end.outcome == "promoted" else study
    return "\n\n".join([*parts, "## Where", markdown_table(rows), next_step])


def check_rows(decision: Mapping[str, Any]) -> list[dict[str, str]]:
    """Make a table of the gate's checks, failed checks first."""
    return [
        {
            "": "ok" if check["passed"] else "NO",
            "demand": f"{'no alarm' if check['kind'] == 'alarm' else check['kind']}: {check['subject']}",
            "found": check["says"],
        }
        for check in sorted(decision["checks"], key=lambda check: check["passed"])
    ]


def markdown_table(rows: list[dict[str, str]]) -> str:
    """Format rows as a Markdown table, which can be read in a terminal, too; bars in cells are escaped."""
    if not rows:
        return "(none)"
    lines = [[cell.replace("|", "\\|") for cell in line] for line in [list(rows[0]), *(row.values() for row in rows)]]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)
