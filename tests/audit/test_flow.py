"""The audit flow on a real run with a real engine and real Prefect: results, events, artifacts and errors."""

from pathlib import Path
from unittest.mock import Mock

import prefect.events
import pytest

from configs import ConfigError
from flows.audit_trajectories import audit_trajectories
from flows.math_mt_ppo import math_mt_ppo
from flows.stages import audit as shell
from storage import layout
from storage.logs import catalog
from storage.maintenance.verify import verify
from storage.objects.store import Store
from storage.versions import manifests
from tasks.tables.sets import TargetError
from tests.support.chain_helpers import key

pytestmark = pytest.mark.usefixtures("prefect_api")


def test_a_real_run_is_clean_until_it_is_damaged(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of the pipeline passes every check of integrity and tokens; a changed byte raises an alarm."""
    emitted = Mock(wraps=prefect.events.emit_event)
    monkeypatch.setattr(shell, "emit_event", emitted)
    math_mt_ppo("smoke", overrides)
    own = [override for override in overrides if override.startswith("storage.")]
    found = audit_trajectories(["smoke"], "smoke", own)
    assert capsys.readouterr().out.rstrip().rpartition("\n")[2].startswith(f"{found['verdict'].upper()}: ")
    alarms = {name: verdict for name, verdict in found["checks"].items() if verdict not in ("pass", "skipped")}
    assert set(alarms) <= EXPECTED_ALARMS, alarms
    assert found["checks"]["logprob_drift"] == found["checks"]["text_differs"] == "pass"
    assert emitted.call_args.kwargs["event"] == f"math-mt-ppo.audit.{found['verdict']}"

    store = Store(f"{tmp_path}/var")
    assert manifests.read(store, found["version"]).kind == "audit"
    assert verify(store, [found["version"]], deep=True).findings == []
    assert audit_trajectories(["smoke"], "smoke", own)["version"] == found["version"], "nothing has changed"

    shard = key(store, layout.trajectories("smoke", 1), "part-00000.parquet")
    store.write(shard, store.read(shard)[:-1] + b"\0")
    with pytest.raises(shell.SuspiciousDataError, match=r"verdict is fail: damaged_objects.*report\.html"):
        audit_trajectories(["smoke"], "smoke", own)
    assert emitted.call_args.kwargs["event"] == "math-mt-ppo.audit.fail"
    assert "damaged_objects" in emitted.call_args.kwargs["payload"]["alarms"]
    assert audit_trajectories([], "smoke", own, fail_on="never")["verdict"] == "fail"
    assert audit_trajectories([], "smoke", own, since="2099-01-01") == {"verdict": "skipped"}


EXPECTED_ALARMS = {"unparsable", "identical_answers", "truncated", "zero_variance", "false_negatives"}
"""Alarms that are right for the episodes of a policy with thirty training steps: of its texts the second checker can
judge few, which the last one says."""


def test_an_unknown_target_is_an_error_that_names_what_exists(tmp_path: Path) -> None:
    """An unknown run, an empty store and an invalid date are errors that name what exists."""
    nowhere = [f"storage.root={tmp_path}/none"]
    catalog.enter(Store(f"{tmp_path}/none"), "runs/r/run", "run", [], "")
    with pytest.raises(TargetError, match="'demo' is neither a run nor a version of trajectories; runs in .*: none"):
        audit_trajectories(["demo"], "smoke", nowhere)
    with pytest.raises(TargetError, match="holds no trajectories of all runs"):
        audit_trajectories([], "smoke", nowhere)
    with pytest.raises(TargetError, match="since='yesterday'"):
        audit_trajectories([], "smoke", nowhere, since="yesterday")


def test_contradictory_arguments_are_refused() -> None:
    """Two stores at once and an unknown level are refused before anything starts."""
    with pytest.raises(ConfigError, match="are in several stores, /a and s3://b"):
        shell.audit_config("demo", [], ["/a/runs/x", "s3://b/runs/y"], "fail")
    with pytest.raises(ConfigError, match="fail-on='sometimes'"):
        shell.audit_config("demo", [], [], "sometimes")
    assert shell.audit_config("demo", [], ["s3://b/p/runs/y/trajectories/000001"], "fail").storage.root == "s3://b/p"
