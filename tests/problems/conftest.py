"""The beginning of a run whose tasks need no Prefect server."""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from flows.run import workspace as run_workspace
from flows.run.configuration import resolve
from flows.run.workspace import Workspace
from flows.stages import problems, rollout, warm_start
from storage.version_names import ProblemsVersion
from tasks.score.verifier import Verifier


@pytest.fixture
def beginning(
    tmp_path: Path,
    policy_folder: Path,
    verifier: Verifier,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> list[str]:
    """Return overrides for a store and an imported policy; tasks get a plain logger and the session's verifier."""
    for module in (run_workspace, warm_start, problems, rollout):
        monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr("flows.run.resources.Verifier", lambda *_, **__: nullcontext(verifier))
    caplog.set_level(logging.INFO, "test")
    return [f"storage.root={tmp_path}/var", f"storage.cache={tmp_path}/cache", f"policy={{path: {policy_folder}}}"]


def begin(*overrides: str, with_policy: bool = True) -> tuple[Workspace, Sequence[ProblemsVersion]]:
    """Run the steps of a run up to its policy; return the problem sets that it then uses."""
    workspace = Workspace(resolve("smoke", overrides))
    run_workspace.start_run.fn(workspace)
    sets = problems.import_problems.fn(workspace)
    if with_policy:
        warm_start.first_policy.fn(workspace, sets)
    return workspace, sets
