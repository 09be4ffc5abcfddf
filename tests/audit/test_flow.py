"""The audit flow on a real run: real engine, real Prefect, real files; what people and schedules get from it."""

from pathlib import Path
from typing import Any

import prefect.events
import pytest

from configs import ConfigError
from flows.audit_trajectories import audit_trajectories
from flows.math_mt_ppo import math_mt_ppo
from storage import layout
from storage.errors import UnavailableError
from storage.logs import catalog
from storage.maintenance.verify import verify
from storage.objects.store import Store
from storage.versions import manifests
from tasks.audit import task as shell
from tasks.audit.selection import TargetError
from tests.support.chain_helpers import key

pytestmark = pytest.mark.usefixtures("prefect_api")
Emitted = list[dict[str, Any]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Emitted:
    """Events on their way to Prefect."""
    events: Emitted = []
    emit = prefect.events.emit_event

    def note(**event: Any) -> object:
        events.append(event)
        return emit(**event)

    monkeypatch.setattr(shell, "emit_event", note)
    return events


def test_a_real_run_is_clean_until_it_is_damaged(overrides: list[str], tmp_path: Path, told: Emitted) -> None:
    """A run of the pipeline's own passes every check of integrity and tokens; a flipped byte raises the hand."""
    math_mt_ppo("smoke", overrides)
    mine = [each for each in overrides if each.startswith("storage.")]
    found = audit_trajectories(["smoke"], "smoke", mine)
    alarms = {name: verdict for name, verdict in found["checks"].items() if verdict not in ("pass", "skipped")}
    assert set(alarms) <= HARDLY_TAUGHT, alarms
    assert found["checks"]["logprob_drift"] == found["checks"]["text_differs"] == "pass"
    assert told[-1]["event"] == f"math-mt-ppo.audit.{found['verdict']}"

    store = Store(f"{tmp_path}/var")
    assert manifests.read(store, found["version"]).kind == "audit"
    assert verify(store, [found["version"]], deep=True).findings == []
    assert audit_trajectories(["smoke"], "smoke", mine)["version"] == found["version"], "nothing has changed"

    shard = key(store, layout.trajectories("smoke", 1), "part-00000.parquet")
    store.write(shard, store.read(shard)[:-1] + b"\0")
    with pytest.raises(shell.SuspiciousDataError, match=r"verdict is fail: Damaged objects.*report\.html"):
        audit_trajectories(["smoke"], "smoke", mine)
    assert told[-1]["event"] == "math-mt-ppo.audit.fail"
    assert "damaged_objects" in told[-1]["payload"]["alarms"]
    assert audit_trajectories([], "smoke", mine, fail_on="never")["verdict"] == "fail"
    assert audit_trajectories([], "smoke", mine, since="2099-01-01") == {"verdict": "skipped"}


HARDLY_TAUGHT = {"unparsable", "identical_answers", "truncated", "zero_variance"}
"""What may rightly be said of episodes that a policy of thirty steps has played."""


def test_a_store_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told in a line: no stack trace, neither of ours nor of Prefect's."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    patience = [f"storage.cache={tmp_path}", "storage.patience_s=2", "storage.request_timeout_s=1"]
    with pytest.raises(UnavailableError, match="s3://bucket/x"):
        audit_trajectories(["s3://bucket/x/runs/demo"], "smoke", patience)
    told = [record for record in caplog.records if "exception" in record.getMessage()]
    assert told
    assert all(record.exc_info is None for record in told)


def test_what_is_not_there_is_told_with_what_is(tmp_path: Path) -> None:
    """A store without data sets, and a date that is none."""
    nowhere = [f"storage.root={tmp_path}/none"]
    catalog.enter(Store(f"{tmp_path}/none"), "runs/r/run", "run", [], "")
    with pytest.raises(TargetError, match="'demo' is neither a run nor a version of trajectories; runs in .*: none"):
        audit_trajectories(["demo"], "smoke", nowhere)
    with pytest.raises(TargetError, match="holds no trajectories of all runs"):
        audit_trajectories([], "smoke", nowhere)
    with pytest.raises(TargetError, match="since='yesterday'"):
        audit_trajectories([], "smoke", nowhere, since="yesterday")


def test_what_cannot_be_meant_is_refused() -> None:
    """Two stores at once, an unknown level: before anything starts."""
    with pytest.raises(ConfigError, match="lie in several stores, /a and s3://b"):
        shell.audit_config("demo", [], ["/a/runs/x", "s3://b/runs/y"], "fail")
    with pytest.raises(ConfigError, match="fail-on='sometimes'"):
        shell.audit_config("demo", [], [], "sometimes")
    assert shell.audit_config("demo", [], ["s3://b/p/runs/y/trajectories/000001"], "fail").storage.root == "s3://b/p"
