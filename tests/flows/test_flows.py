"""The flows end to end, with real Prefect, real vLLM and real files."""

import json
import logging
import shutil
from collections import Counter
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import AsyncMock, Mock

import duckdb
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from flows.evaluate import evaluate
from flows.fit import fit
from flows.math_mt_ppo import math_mt_ppo
from flows.rollout import rollout
from flows.score import score
from flows.stages.problems import FIXED_SETS
from flows.train import train
from storage import layout
from storage.maintenance import gc
from storage.maintenance.verify import verify
from storage.objects.store import Store
from storage.versions import aliases, checkpoints, datasets, drafts, manifests
from tasks.metrics.log import read_rows
from tasks.provenance.questions import training_data
from tasks.train.orders import Made
from tasks.train.replay import replay
from tasks.train.version_trainer import VersionTrainer
from tests.support.chain_helpers import nonces
from tests.support.killed_flow import OVERLAP
from tests.support.waiting_engine import WaitingEngine, opens


def run_flow(config: str, overrides: list[str]) -> dict[str, Any]:
    """Run the main flow; return the numbers of its report."""
    root, _, report = math_mt_ppo(config, overrides).partition("/runs/")
    summary: dict[str, Any] = json.loads(Store(root).read(f"runs/{report}/summary.json"))
    return summary


def test_stages_alone_and_the_main_flow_commit_a_whole_chain(
    overrides: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The main flow continues from what flows of one stage have made, and makes none of it again.

    Every stage commits a version, and parents lead from the last checkpoint back to the problems.
    """
    caplog.set_level(logging.INFO, "prefect.flow_runs")
    trajectories = rollout("smoke", overrides, iteration=0)
    assert score("smoke", overrides, iteration=0) == (scores := score("smoke", overrides, iteration=0))
    assert f"{trajectories} is committed" in caplog.text
    assert f"{scores} was there already" in caplog.text
    policy = train("smoke", overrides, iteration=0)
    assert (trajectories, policy) == (layout.trajectories("smoke", 0), layout.checkpoint("smoke", 1))
    evaluate("smoke", overrides, policy=policy)
    before = nonces(tmp_path)
    numbers = run_flow("smoke", overrides)
    assert before.items() <= nonces(tmp_path).items()
    assert numbers["iterations"] == 2
    assert [evaluation["policy_version"] for evaluation in numbers["evaluations"]] == [1, 2]
    assert numbers["training"][1]["trajectories"] == 16

    store = Store(f"{tmp_path}/var")
    seen, pending = set[str](), list[str]([layout.checkpoint("smoke", 2)])
    while pending:
        version = pending.pop()
        manifest = manifests.read(store, version)
        assert manifest.prefect_run_id
        assert manifest.config["run"]["name"] == "smoke"
        for parent in manifest.parents:
            assert parent == manifests.as_parent(store, parent.version)
        seen.add(version)
        pending += [parent.version for parent in manifest.parents if parent.version not in seen]
    assert {layout.checkpoint("smoke", 0), layout.trajectories("smoke", 0), layout.trajectories("smoke", 1)} <= seen
    assert layout.run("smoke") in seen
    assert any(version.startswith("problems/") for version in seen)

    logged = read_rows(store, "smoke")
    assert Counter(row["stage"] for row in logged) == {"evaluate": 2, "rollout": 2, "score": 2, "train": 2}
    shutil.rmtree(tmp_path / "var/runs/smoke/metrics")
    assert read_rows(store, "smoke") == logged  # made from the manifests

    turns, scored, agreeing = duckdb.execute(f"""
        with turns as (
            select trajectory_id, generate_subscripts(turns, 1) - 1 as turn, unnest(turns).reward as reward
            from '{tmp_path}/var/runs/smoke/trajectories/*/*/*.parquet')
        select count(*), count(s.turn), count(*) filter (t.reward = s.success)
        from turns t left join '{tmp_path}/var/runs/smoke/scores/*/*/*/*.parquet' s using (trajectory_id, turn)
        """).fetchall()[0]
    assert turns == scored == agreeing >= 16  # of each turn one score, which agrees with the environment
    assert (tmp_path / "var/runs/smoke/report/learning_curve.png").stat().st_size > 10_000


def test_a_failed_rollout_can_be_tried_again(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many failed episodes end the rollout. The next attempt does not continue from their stored shards."""
    settings = [*overrides, "rollout.rows_per_shard=4"]
    with monkeypatch.context() as patch:
        patch.setattr("tasks.environments.math_verify.MathVerifyEnvironment.step", AsyncMock(side_effect=RuntimeError))
        with pytest.raises(ValueError, match="max_failed_share"):
            rollout("smoke", settings, iteration=0)
    version = rollout("smoke", settings, iteration=0)
    rows = list(datasets.trajectories(Store(f"{tmp_path}/var"), version, tmp_path))
    assert len(rows) == 16
    assert "failed" not in {row.status for row in rows}


def test_a_stream_plays_later_iterations_while_this_one_trains(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of later iterations start before checkpoint i + 1 exists. Their policy is never older than allowed."""
    store, seen = Store(f"{tmp_path}/var"), list[tuple[int, int]]()

    def on_request(version: int) -> None:
        newest = max(n for n in range(6) if manifests.committed(store, layout.checkpoint("smoke", n)))
        seen.append((version, newest))

    monkeypatch.setattr("flows.run.resources.open_engine", opens(WaitingEngine(0.05, on_request)))
    numbers = run_flow("smoke", [*overrides, *OVERLAP, "run.iterations=4", "evaluation.every=4"])
    assert [metrics["staleness/max"] for metrics in numbers["training"]] == [0, 1, 2, 2]
    assert [metrics["trajectories/too_old"] for metrics in numbers["training"]] == [0, 0, 0, 0]
    assert all(newest - version <= 2 for version, newest in seen)
    assert {version for version, newest in seen if newest == version} >= {0, 1}
    report = verify(store, [layout.checkpoint("smoke", 4)])
    assert (report.findings, report.collected) == ([], 2)  # of checkpoints the last two and number 0 stay


def test_a_checkpoint_is_stored_while_the_next_rollout_plays(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollout begins before the policy that it plays with is stored, and is kept only after: not if that fails.

    The next flow run trains again on what was scored, with the same result as without a failure.
    """
    settings = [*overrides, "run.iterations=3", "evaluation.every=9", "rollout.rows_per_shard=4", "storage.keep=null"]
    store, write = Store(f"{tmp_path}/var"), VersionTrainer.write
    asked, number, fails = Event(), 0, True

    def on_request(version: int) -> None:
        if version == number:
            asked.set()

    def late(trainer: VersionTrainer) -> Made:
        nonlocal number
        number += 1
        assert number == 3 or asked.wait(60)  # by the policy that is stored now; after the last one nothing plays
        asked.clear()
        if fails and number == 2:
            raise OSError("the store is away")
        return write(trainer)

    monkeypatch.setattr("flows.run.resources.open_engine", opens(WaitingEngine(0.05, on_request)))
    monkeypatch.setattr(VersionTrainer, "write", late)
    with pytest.raises(OSError, match="the store is away"):
        run_flow("smoke", settings)
    assert manifests.committed(store, layout.checkpoint("smoke", 1))
    assert not manifests.committed(store, layout.checkpoint("smoke", 2))
    assert drafts.shards(store, layout.trajectories("smoke", 2)) == {}
    number, fails = 1, False
    run_flow("smoke", settings)
    monkeypatch.undo()
    assert [each.verdict for each in replay(store, "smoke@0..3", f"{tmp_path}/cache", print)] == ["the same bits"] * 3


def test_a_failure_of_training_ends_the_stream(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If training fails, the stream is cancelled, and only training's error is reported, also in traces."""
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("storage.telemetry.spans._tracer", provider.get_tracer("test"))
    monkeypatch.setattr("tasks.cluster.trainer.RayTrainer.update", Mock(side_effect=ValueError("training broke")))
    with pytest.raises(ValueError, match="training broke"):
        run_flow("smoke", [*overrides, *OVERLAP, "run.iterations=4"])
    store = Store(f"{tmp_path}/var")
    assert manifests.committed(store, layout.trajectories("smoke", 0))
    assert not manifests.committed(store, layout.trajectories("smoke", 3))
    assert "Finished in state Cancelled" in caplog.text
    assert "EngineClosedError" not in caplog.text
    assert not manifests.committed(store, layout.checkpoint("smoke", 1))
    failed = {span.name: span.status.description for span in exporter.get_finished_spans() if not span.status.is_ok}
    assert failed.get("iteration") == failed.get("train") == "ValueError"


def test_a_filter_that_leaves_nothing_does_not_end_the_run(overrides: list[str]) -> None:
    """If all groups and their replacements are rejected, the policy stays, and the run and its report continue."""
    bounds = "rollout={problems_per_iteration: 4, group_size: 4, success_rate_lb: 1.0, max_resampling_rounds: 1}"
    numbers = run_flow("smoke", [*overrides, bounds, "run.iterations=2"])
    assert [metrics["trajectories"] for metrics in numbers["training"]] == [0, 0]
    assert [metrics["groups/rejected"] for metrics in numbers["training"]] == [8, 8]
    assert "train" not in numbers["stages"]


def test_a_policy_is_trained_from_the_store_alone(trained: list[str], tmp_path: Path) -> None:
    """Two epochs of a run's data set, filtered, with `dpo`: checkpoints and lineage; again, nothing is left to do."""
    store, first = Store(f"{tmp_path}/var"), f"policy={{path: {tmp_path}/var/{layout.checkpoint('smoke', 0)}}}"
    options = ["run.name=fitted", "algorithm.type=dpo", "fit.epochs=2", "fit.where=turns < 3", "evaluation.every=9"]
    (store_root, _, report) = fit("smoke", [*trained, *options, first], ["smoke"]).partition("/runs/")
    assert (store_root, report) == (store.root, "fitted/report")
    manifest = manifests.read(store, layout.checkpoint("fitted", 2))
    assert manifest.settings["fit"]["data"] == [layout.trajectories("smoke", 0)]
    assert layout.trajectories("smoke", 0) in manifest.parent_names
    begun = [manifests.read(store, layout.checkpoint(run, 0)).metrics for run in ("smoke", "fitted")]
    assert begun[0][FIXED_SETS] == begun[1][FIXED_SETS]
    assert not manifests.committed(store, layout.checkpoint("fitted", 3))
    assert verify(store, [layout.checkpoint("fitted", 2)]).findings == []
    before = nonces(tmp_path / "var")
    fit("smoke", [*trained, *options, first], ["smoke"])
    assert nonces(tmp_path / "var") == before


def test_a_fork_goes_on_with_the_optimizer_and_other_settings(trained: list[str], tmp_path: Path) -> None:
    """Weights, moments and steps are those of the other run, which is in the lineage of what the fork trains."""
    origin, store = layout.checkpoint("smoke", 1), Store(f"{tmp_path}/var")
    other = ["run.name=fork", "run.iterations=1", "optimizer.lr=1e-5"]
    other += ["algorithm.advantage={type: gae}", "algorithm.critic={}"]
    run_flow("smoke", [*trained, *other, "policy={fork: smoke@1}", "evaluation.every=2"])
    opened = [
        checkpoints.open_checkpoint(store, version, tmp_path, state=True)
        for version in (origin, layout.checkpoint("fork", 0), layout.checkpoint("fork", 1))
    ]
    assert opened[0].canary == opened[1].canary != opened[2].canary
    digests = [{file.name: file.sha256 for file in each.manifest.files} for each in opened]
    kept = digests[0].keys() - {"state/state.json"}
    assert {name: digests[1][name] for name in kept} == {name: digests[0][name] for name in kept}
    counts = [json.loads((each.state / "state.json").read_text()) for each in opened if each.state]
    assert counts[2]["steps"] == 2 * counts[1]["steps"] == 2 * counts[0]["steps"] > 0
    assert opened[2].manifest.knob("optimizer.lr") == 1e-5

    answer = training_data(store, layout.checkpoint("fork", 1), tmp_path)
    assert answer.lineage[:3] == [layout.checkpoint("fork", 1), layout.checkpoint("fork", 0), origin]
    assert (answer.updates, answer.unknown) == (2, {})
    assert verify(store, [layout.checkpoint("fork", 1)]).findings == []
    aliases.move(store, "best", layout.checkpoint("fork", 1), None)
    assert {origin, layout.trajectories("smoke", 0)} <= gc.kept(store, [], gc.Rules())
