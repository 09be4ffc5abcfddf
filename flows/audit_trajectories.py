"""The audit of trajectory data sets: their contents, suspicious cases and the conversations themselves.

    data sets ──> hashes, schemas, lineage ──> DuckDB ──> every check ──> verdict, report, cases ──> an event

python -m flows.audit_trajectories demo
python -m flows.audit_trajectories s3://bucket/prefix/runs/demo/trajectories/000003 --since 7d
"""

from typing import Any, Literal

from prefect import flow

from flows.launch.cli import main
from flows.run import progress, resources
from flows.run.workspace import open_unleased
from flows.stages.audit import audit, audit_config, report_audit, select_data_sets


@flow(name="audit-trajectories")
def audit_trajectories(
    targets: list[str] | None = None,
    config: str = "demo",
    overrides: list[str] | None = None,
    since: str = "",
    fail_on: Literal["fail", "warn", "never"] = "fail",
) -> dict[str, Any]:
    """Run all checks on trajectory data sets; the flow run fails if the verdict is as bad as `fail_on` or worse.

    Args:
        targets: runs, and versions or URIs of trajectories or evaluations. Empty: all runs of the store.
        config: see `math_mt_ppo`; only its `storage`, `score` and `audit` are used.
        overrides: see `math_mt_ppo`.
        since: only data sets committed since a date (2026-11-14) or within a duration (12h, 7d, 2w).
        fail_on: `fail`, `warn` or `never`.
    """
    targets = targets or []
    with open_unleased(audit_config(config, overrides or [], targets, fail_on)) as workspace:
        data_sets = select_data_sets(workspace, targets, since)
        if not data_sets:
            return {"verdict": "skipped"}
        with resources.open_verifier(workspace) as verifier:
            version = audit(workspace, verifier, data_sets)
        progress.log_last(workspace, version)
        return report_audit(workspace, version, fail_on)


if __name__ == "__main__":
    main(audit_trajectories)
