"""Tasks of the audit: choose data sets, look at them, show what was found, and raise a hand."""

import logging
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prefect import get_run_logger, task
from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event

from configs import Config, ConfigError
from storage.errors import StorageError
from storage.visible import printable
from tasks.run.configuration import resolve
from tasks.run.workspace import Workspace

if TYPE_CHECKING:
    from tasks.audit.selection import DataSet
    from tasks.score.verifier import Verifier

EVENTS = "math-mt-ppo.audit"
"""Prefix of the events: `.pass`, `.warn`, `.fail`, `.skipped`."""
_WIDTH = 140
_LEVELS = {"never": (), "fail": ("fail",), "warn": ("warn", "fail")}


class SuspiciousDataError(RuntimeError):
    """An audit came to a verdict that shall not pass unnoticed."""


def speak_plainly() -> None:
    """Let Prefect log errors that say what is wrong and what to do as one line, without the code that they passed."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_without_trace)  # which takes a filter once only


def _without_trace(record: logging.LogRecord) -> bool:
    from tasks.audit.selection import TargetError

    expected = (StorageError, ConfigError, TargetError, SuspiciousDataError)
    if record.exc_info and isinstance(record.exc_info[1], expected):
        record.exc_info = None
    return True


def audit_config(config: str, overrides: Sequence[str], targets: Sequence[str], fail_on: str) -> Config:
    """The configuration; URIs among the targets say which store is meant.

    Raises:
        ConfigError: see `resolve`; or the targets lie in several stores.
    """
    from tasks.audit.selection import split_uri

    if fail_on not in _LEVELS:
        raise ConfigError(f"fail-on={fail_on!r}: choose one of {', '.join(_LEVELS)}")
    roots = sorted({root for target in targets if (root := split_uri(target)[0])})
    if len(roots) > 1:
        raise ConfigError(f"the targets lie in several stores, {' and '.join(roots)}: audit them one after the other")
    return resolve(config, [*overrides, *(f"storage.root={root}" for root in roots)])


@task(name="select-data-sets", cache_policy=NO_CACHE)
def select_data_sets(workspace: Workspace, targets: Sequence[str], since: str) -> "list[DataSet]":
    """The trajectory data sets that `targets` mean.

    Raises:
        TargetError: none is meant; says what there is.
    """
    from tasks.audit.selection import TargetError, select
    from tasks.audit.selection import since as moment

    found = select(workspace.store, targets, moment(since))
    told = f"{', '.join(targets) or 'all runs'}{f' since {since}' if since else ''}"
    if not found and not since:
        raise TargetError(f"{workspace.store.root} holds no trajectories of {told}: nothing to audit")
    get_run_logger().info("%s: %d data sets in %s", told, len(found), workspace.store.root)
    if not found:
        get_run_logger().info("nothing was committed in that time: there is nothing to audit")
    return found


@task(name="audit", cache_policy=NO_CACHE)
def audit(workspace: Workspace, verifier: "Verifier", data_sets: "list[DataSet]") -> str:
    """The version of what every check found."""
    from tasks.audit.record import commit_audit
    from tasks.audit.run import audit as look

    store, cache, settings = workspace.store, workspace.cache, workspace.config.audit
    reader = f"python -m tasks.audit --root {shlex.quote(store.root)} read"
    with look(store, data_sets, settings, cache, verifier, get_run_logger().info) as audited:
        manifest = commit_audit(store, data_sets, audited, workspace.provenance(), cache, reader)
    return manifest.version


@task(name="report-audit", cache_policy=NO_CACHE)
def report_audit(workspace: Workspace, version: str, fail_on: str) -> dict[str, Any]:
    """Show an audit as tables, artifacts and an event; returns the verdicts.

    Raises:
        SuspiciousDataError: its verdict is one that `fail_on` names.
    """
    from rich.console import Console

    from tasks.audit.record import REPORT, read_audit
    from tasks.audit.report.markdown import check_rows, pictures, summary
    from tasks.evaluate.summary import table

    store = workspace.store
    result, folder = read_audit(store, version, workspace.cache)
    rows, path = check_rows(result), (folder / REPORT).absolute()
    console = Console()
    console.width = max(console.width, _WIDTH)
    brief = [{key: value for key, value in row.items() if key != "found"} for row in rows]
    console.print(table(f"Audit {version}", brief))
    for row in rows:
        if row["verdict"] != "pass":
            console.print(printable(f"{row['verdict']}: {row['check']}: {row['found']}"), markup=False, highlight=False)
    text = f"{summary(result)}\n{pictures(result)}"
    create_markdown_artifact(key="audit", markdown=text, description=f"Audit {version}")
    create_table_artifact(key="audit-checks", table=rows, description=f"Checks of {version}")
    create_link_artifact(key="audit-report", link=path.as_uri(), link_text="report.html", description=version)
    emit_event(
        event=f"{EVENTS}.{result.verdict}",
        resource={"prefect.resource.id": f"math-mt-ppo.{version.replace('/', '.')}", "prefect.resource.name": version},
        payload={
            "verdict": result.verdict,
            "report": str(path),
            "alarms": [check.name for check in result.checks if check.verdict in ("warn", "fail")],
        },
    )
    get_run_logger().info("%s; report in %s", store.uri(version), path)
    if result.verdict in _LEVELS[fail_on]:
        alarms = "; ".join(f"{check.title}: {check.says}" for check in result.checks if check.verdict == result.verdict)
        raise SuspiciousDataError(f"the audit's verdict is {result.verdict}: {alarms}. Read {path}")
    return {"version": version, "verdict": result.verdict, "checks": {c.name: c.verdict for c in result.checks}}
