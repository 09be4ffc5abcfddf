"""The report of a night as Markdown."""

from collections.abc import Mapping
from typing import Any

from configs import Config
from storage.logs.nights import Record
from storage.objects.store import Store
from tasks.evaluate.summary import comparison_rows

_HEADLINES = {
    "promoted": "Night {number}: promoted. The champion is now `{challenger}`",
    "rejected": "Night {number}: rejected. The champion stays `{champion}`",
    "overtaken": "Night {number}: not promoted, since another writer moved the champion meanwhile",
    "given up": "Night {number}: given up by hand",
}


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
