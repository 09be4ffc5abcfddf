"""Tasks: report a night by a Markdown artifact, files, a plot, and Prefect events that can trigger automations."""

from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event

from storage import layout
from storage.logs.nights import Night, Nights, Record
from storage.versions import manifests
from tasks.evaluate.summary import rendered, table
from tasks.retrain.night_report import alarms, check_rows, night_markdown
from tasks.retrain.timeline import timeline_rows, write_timeline
from tasks.run.workspace import Workspace

EVENTS = "math-mt-ppo.retrain"
"""Prefix of the events: `.promoted`, `.rejected`, `.overtaken`, `.alarm`, `.nothing-new`."""


@task(name="report-night", cache_policy=NO_CACHE)
def report_night(workspace: Workspace, record: Record) -> str:
    """Write the night's report to the retraining's folder, show it, and emit its events; return the outcome."""
    store, config, night, end = workspace.store, workspace.config, record.night, record.end
    assert end
    assert end.decision
    decision = manifests.read(store, end.decision).metrics
    text = night_markdown(store, config, record, decision)
    events = write_timeline(store, config)
    print(rendered(table(f"Night {night.number}: {end.outcome}", check_rows(decision))))
    create_markdown_artifact(key="night", markdown=text, description=f"Night {night.number} of {workspace.name}")
    create_table_artifact(key="nights", table=timeline_rows(events), description=f"Champions of {workspace.name}")
    payload = {
        "night": night.number,
        "champion": decision["champion"],
        "challenger": decision["challenger"],
        "decision": end.decision,
        "report": store.uri(f"{layout.retraining(workspace.name)}/report"),
    }
    if off := alarms(decision):
        _emit(workspace, "alarm", payload | {"alarms": off})
    _emit(workspace, end.outcome, payload)
    store.write(_report(workspace, night), text.encode())  # last: this file marks the night as reported
    get_run_logger().info("night %d: %s; report in %s", night.number, end.outcome, payload["report"])
    return end.outcome


def report_last(workspace: Workspace) -> None:
    """Report the last night that ended, unless it was reported."""
    ended = [record for record in Nights(workspace.store, workspace.name).read() if record.end and record.end.decision]
    if ended and not workspace.store.exists(_report(workspace, ended[-1].night)):
        report_night(workspace, ended[-1])


def _report(workspace: Workspace, night: Night) -> str:
    return f"{layout.retraining(workspace.name)}/report/night-{night.number:04d}.md"


@task(name="nothing-new", cache_policy=NO_CACHE)
def report_nothing_new(workspace: Workspace) -> str:
    """Log that too few problems have come since the last night, and emit the event."""
    least = workspace.config.retrain.min_new
    get_run_logger().info("nothing new: fewer than %d problems have come since the last night", least)
    _emit(workspace, "nothing-new", {"min_new": least})
    return "nothing new"


def _emit(workspace: Workspace, event: str, payload: dict[str, Any]) -> None:
    resource = {"prefect.resource.id": f"math-mt-ppo.retraining.{workspace.name}",
                "prefect.resource.name": workspace.name}  # fmt: skip
    emit_event(event=f"{EVENTS}.{event}", resource=resource, payload=payload)
