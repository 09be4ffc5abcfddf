"""The Prefect tasks of the audit: select data sets, run the checks, report the verdict and fail if it is bad enough."""

import shlex
from collections.abc import Sequence
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event

from configs import Config, ConfigError
from flows.run.configuration import resolve
from flows.run.workspace import Workspace
from storage import layout
from storage.visible import Fleeting, printable
from tasks.audit.report import plots, wording
from tasks.audit.run import REPORT, commit_audit, read_audit
from tasks.audit.run import audit as run_checks
from tasks.evaluate.summary import table
from tasks.score.verifier import Verifier
from tasks.tables.sets import DataSet, TargetError, parse_since, select

EVENTS = "math-mt-ppo.audit"
"""Prefix of the events: `.pass`, `.warn`, `.fail`, `.skipped`."""
_WIDTH = 140
_LEVELS = {"never": (), "fail": ("fail",), "warn": ("warn", "fail")}


class SuspiciousDataError(RuntimeError):
    """The verdict of an audit is one on which the flow has to fail."""


def audit_config(config: str, overrides: Sequence[str], targets: Sequence[str], fail_on: str) -> Config:
    """Return the configuration; its store is the one that URIs among the targets name.

    Raises:
        ConfigError: `fail_on` is unknown, the targets are in several stores, or for the reasons of `resolve`.
    """
    if fail_on not in _LEVELS:
        raise ConfigError(f"fail-on={fail_on!r}: choose one of {', '.join(_LEVELS)}")
    roots = sorted({root for target in targets if (root := layout.split_uri(target)[0])})
    if len(roots) > 1:
        raise ConfigError(f"the targets are in several stores, {' and '.join(roots)}: audit each store by itself")
    return resolve(config, [*overrides, *(f"storage.root={root}" for root in roots)])


@task(name="select-data-sets", cache_policy=NO_CACHE)
def select_data_sets(workspace: Workspace, targets: Sequence[str], since: str) -> list[DataSet]:
    """Return the trajectory data sets that `targets` name.

    Raises:
        TargetError: a target names no data set, or nothing is found although `since` is empty.
    """
    data_sets = select(workspace.store, targets, parse_since(since))
    wanted = f"{', '.join(targets) or 'all runs'}{f' since {since}' if since else ''}"
    if not data_sets and not since:
        raise TargetError(f"{workspace.store.root} holds no trajectories of {wanted}: nothing to audit")
    get_run_logger().info("%s: %d data sets in %s", wanted, len(data_sets), workspace.store.root)
    return data_sets


@task(name="audit", cache_policy=NO_CACHE)
def audit(workspace: Workspace, verifier: Verifier, data_sets: list[DataSet]) -> str:
    """Run all checks on `data_sets` and commit what they found; return the version."""
    store, cache, settings = workspace.store, workspace.cache, workspace.config.audit
    reader = f"python -m tasks.audit --root {shlex.quote(store.root)} read"
    log = get_run_logger().info
    with run_checks(store, data_sets, settings, cache, verifier, lambda line: log(Fleeting(line))) as audited:
        return commit_audit(store, data_sets, audited, workspace.provenance(), cache, reader).version


@task(name="report-audit", cache_policy=NO_CACHE)
def report_audit(workspace: Workspace, version: str, fail_on: str) -> dict[str, Any]:
    """Show an audit as tables, artifacts and an event; return the verdicts.

    Raises:
        SuspiciousDataError: the verdict is one on which `fail_on` makes the flow fail.
    """
    from rich.console import Console

    result, folder = read_audit(workspace.store, version, workspace.cache)
    rows, path = wording.check_rows(result), (folder / REPORT).absolute()
    console = Console()
    console.width = max(console.width, _WIDTH)
    without_findings = [{key: value for key, value in row.items() if key != "found"} for row in rows]
    console.print(table(f"Audit {version}", without_findings))
    for row in rows:
        if row["verdict"] != "pass":
            console.print(printable(f"{row['verdict']}: {row['check']}: {row['found']}"), markup=False, highlight=False)
    text = f"{wording.summary(result)}\n{plots.pictures(result)}"
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
    if result.verdict in _LEVELS[fail_on]:
        why = "; ".join(f"{check.name}: {check.says}" for check in result.checks if check.verdict == result.verdict)
        raise SuspiciousDataError(f"the audit's verdict is {result.verdict}: {why}. Read {path}")
    print(printable(f"{wording.headline(result)}. Report: {path}"))
    return {"version": version, "verdict": result.verdict, "checks": {c.name: c.verdict for c in result.checks}}
