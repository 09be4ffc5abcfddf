"""Reports: a night as Markdown, and a table of all nights and moves of the champion."""

from collections.abc import Mapping
from typing import Any

from configs import Config
from storage.logs.nights import End, Nights, Record
from storage.objects.store import Store
from storage.versions import aliases, manifests
from tasks.evaluate.summary import comparison_rows

_HEADLINES = {
    "promoted": "Night {number}: promoted. The champion is now `{challenger}`",
    "rejected": "Night {number}: rejected. The champion stays `{champion}`",
    "overtaken": "Night {number}: not promoted, since another writer moved the champion meanwhile",
    "given up": "Night {number}: given up by hand",
}


def timeline(store: Store, config: Config) -> list[dict[str, str]]:
    """Make a table of all moves of the champion's alias, each followed by the nights that ended without moving it.

    The rows are ordered by the numbers in both logs, not by clocks.
    """
    ended = [(record.night.number, record.end) for record in Nights(store, config.run.name).read() if record.end]
    promoting = {str(end.challenger): (night, end) for night, end in ended if end.outcome == "promoted"}
    rows = list[dict[str, str]]()
    for move in aliases.history(store, config.retrain.champion):
        night, end = promoting.pop(move.version, (0, None))
        label = f"night {night}" if end else "first" if move.number == 0 else f"move {move.number}"
        what = "promoted" if end else move.reason
        rows.append({"": label, "what": what, "champion": move.version, "challenger": "", "gate": _reason(store, end)})
        for night, end in ended:
            if end.move == move.number and end.outcome != "promoted":
                about = {"challenger": end.challenger or "", "gate": _reason(store, end)}
                rows.append({"": f"night {night}", "what": end.outcome, "champion": move.version, **about})
    return rows


def _reason(store: Store, end: End | None) -> str:
    """Return what a night's gate says of the target set; empty if it has decided nothing."""
    checks = manifests.read(store, end.decision).metrics["checks"] if end and end.decision else []
    return next((check["says"] for check in checks if check["kind"] == "better"), "")


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
