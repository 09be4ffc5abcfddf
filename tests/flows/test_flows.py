"""The flows end to end, with real Prefect, real vLLM and real files."""

import itertools
import json
import logging
import re
import shutil
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import duckdb
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from configs import ConfigError
from flows.evaluate import evaluate
from flows.fit import fit
from flows.math_mt_ppo import math_mt_ppo
from flows.rollout import rollout
from flows.score import score
from flows.stages.problems import FIXED_SETS
from flows.train import train
from storage import layout
from storage.errors import LeaseHeldError, StorageError
from storage.logs.leases import Lease
from storage.maintenance import gc
from storage.maintenance.verify import verify
from storage.objects.store import Store
from storage.versions import aliases, checkpoints, datasets, manifests
from tasks.inference.api import Completion
from tasks.inference.completions import completion_of
from tasks.metrics.log import read_rows
from tasks.problems.exclusions import commit_exclusions
from tasks.provenance.questions import propose_ids, training_data
from tests.conftest import MadeOnce
from tests.support.chain_helpers import nonces
from tests.support.killed_flow import OVERLAP
from tests.support.lagging import lagging
from tests.support.waiting_engine import WaitingEngine, opens


def run_flow(config: str, overrides: list[str]) -> dict[str, Any]:
    """Run the main flow; return the numbers of its report."""
    root, _, report = math_mt_ppo(config, overrides).partition("/runs/")
    summary: dict[str, Any] = json.loads(Store(root).read(f"runs/{report}/summary.json"))
    return summary


def test_the_main_flow_commits_a_whole_chain(overrides: list[str], tmp_path: Path) -> None:
    """Every stage commits a version, and parents lead from the last checkpoint back to the problems."""
    numbers = run_flow("smoke", overrides)
    assert numbers["iterations"] == 2
    assert [evaluation["policy_version"] for evaluation in numbers["evaluations"]] == [0, 2]
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

    report = tmp_path / "var/runs/smoke/report"
    assert (report / "learning_curve.png").stat().st_size > 10_000


@pytest.mark.usefixtures("trained")
def test_rows_join_their_scores_in_duckdb(tmp_path: Path) -> None:
    """DuckDB can query the data sets. Each turn has one score, and the scores agree with the environment."""
    trajectories = f"{tmp_path}/var/runs/smoke/trajectories/*/*/*.parquet"
    scores = f"{tmp_path}/var/runs/smoke/scores/*/*/*/*.parquet"
    turns, scored, agreeing = duckdb.execute(f"""
        with turns as (
            select trajectory_id, generate_subscripts(turns, 1) - 1 as turn, unnest(turns).reward as reward
            from '{trajectories}')
        select count(*), count(s.turn), count(*) filter (t.reward = s.success)
        from turns t left join '{scores}' s using (trajectory_id, turn)""").fetchall()[0]
    assert turns == scored == agreeing >= 16


def test_run_again_continues(trained: list[str], tmp_path: Path) -> None:
    """Nothing committed is done twice, more iterations continue from the last checkpoint, and others are refused."""
    before = nonces(tmp_path)
    with pytest.raises(ConfigError, match=r"algorithm.eps_clip: 0.2 -> 0.3(.|\n)*run.name="):
        run_flow("smoke", [*trained, "algorithm.eps_clip=0.3"])
    run_flow("smoke", [*trained, "run.iterations=1"])
    assert nonces(tmp_path) == before
    run_flow("smoke", trained)
    after = nonces(tmp_path)
    assert before.items() <= after.items()
    assert str(tmp_path / "var/runs/smoke/checkpoints/000002/manifest.json") in after


def test_stages_alone_make_the_same_run(overrides: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The stage flows commit versions from which the main flow continues, and name the next command."""
    caplog.set_level(logging.INFO, "prefect.flow_runs")
    trajectories = rollout("smoke", overrides, iteration=0)
    assert score("smoke", overrides, iteration=0) == (scores := score("smoke", overrides, iteration=0))
    assert f"iteration 0: {trajectories} is committed. Next: python -m flows.score smoke " in caplog.text
    assert f"iteration 0: {scores} was there already. Next: python -m flows.train smoke " in caplog.text
    policy = train("smoke", overrides, iteration=0)
    evaluate("smoke", overrides, policy=layout.checkpoint("smoke", 1))
    assert trajectories == layout.trajectories("smoke", 0)
    assert scores.startswith("runs/smoke/scores/000000/")
    assert policy == layout.checkpoint("smoke", 1)
    before = nonces(tmp_path)
    run_flow("smoke", overrides)
    assert before.items() <= nonces(tmp_path).items()


@pytest.mark.parametrize("victim", ["trajectories/000000", "scores/000000/*", "checkpoints/000000"])
def test_damaged_data_are_not_trained_on(
    overrides: list[str], tmp_path: Path, victim: str, made_once: MadeOnce
) -> None:
    """If one bit is flipped, the error names the object, and no checkpoint is made."""

    def play_and_score() -> None:
        rollout("smoke", overrides, iteration=0)
        score("smoke", overrides, iteration=0)

    made_once("scored", tmp_path / "var", play_and_score)
    (folder,) = (tmp_path / "var/runs/smoke").glob(victim)
    path = max(folder.glob("*/**/*.*"), key=lambda file: file.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageError, match=f"{path.name} does not match the sha256 in its manifest: it is damaged"):
        train("smoke", overrides, iteration=0)
    assert not manifests.committed(Store(f"{tmp_path}/var"), layout.checkpoint("smoke", 1))


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


def test_two_flow_runs_of_one_run(overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second flow run stops and names the holder of the run, or waits. It never forks the run."""
    settings = [*overrides, "run.iterations=0"]
    held = Lease(Store(f"{tmp_path}/var"), "smoke", label="flow run early-eagle")
    with held, pytest.raises(LeaseHeldError, match="'smoke' is being written by flow run early-eagle"):
        math_mt_ppo("smoke", settings)
    assert not (tmp_path / "var/runs").exists()
    with held:
        waiting = threading.Event()
        monkeypatch.setattr("storage.logs.leases.logger.warning", lambda *_: waiting.set())

        def release() -> None:
            waiting.wait()
            held.__exit__(None, None, None)

        threading.Thread(target=release).start()
        math_mt_ppo("smoke", [*settings, "run.when_held=wait"])
        assert waiting.is_set()
    manifest = manifests.read(Store(f"{tmp_path}/var"), layout.checkpoint("smoke", 0))
    assert manifest.fence == 2


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


@pytest.mark.long
def test_overlap_on_the_real_engine_continues_after_a_stop(overrides: list[str], tmp_path: Path) -> None:
    """A run that stopped after the next rollout trains on it. Tokens record the versions that sampled them.

    The agent asks the endpoint, which here answers a stream.
    """
    agent = "agent={type: openai, args: {entry: 'tests.agents.endpoint.solvers:two_turns'}}"
    settings = [*overrides, *OVERLAP, agent]
    run_flow("smoke", [*settings, "run.iterations=2"])
    trajectories = rollout("smoke", [*settings, "run.iterations=2"], iteration=2)  # before checkpoint 3 exists
    before = nonces(tmp_path)
    numbers = run_flow("smoke", [*settings, "run.iterations=4"])
    assert before.items() <= nonces(tmp_path).items()
    store = Store(f"{tmp_path}/var")
    for iteration in range(numbers["iterations"]):
        manifest = manifests.read(store, layout.trajectories("smoke", iteration))
        rows = list(datasets.trajectories(store, manifest.version, tmp_path))
        versions = {version for row in rows for version in row.versions} - {-1}
        assert versions == set(manifest.metrics["policy_versions"]) <= set(range(max(0, iteration - 2), iteration + 1))
        assert {layout.checkpoint("smoke", v) for v in versions} < {parent.version for parent in manifest.parents}
    assert trajectories == layout.trajectories("smoke", 2)


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


def test_staleness_on_purpose_is_bounded_by_the_committed_versions(overrides: list[str]) -> None:
    """With a lag of 2, policy 0 plays three iterations. With a limit of 1 the third would have no rows left."""
    with lagging(2):
        numbers = run_flow("smoke", [*overrides, "rollout.max_head_offpolicyness=2", "run.iterations=3"])
    assert [metrics["staleness/mean"] for metrics in numbers["training"]] == [0, 1, 2]


def test_a_filter_that_leaves_nothing_does_not_end_the_run(overrides: list[str]) -> None:
    """If all groups and their replacements are rejected, the policy stays, and the run and its report continue."""
    bounds = "rollout={problems_per_iteration: 4, group_size: 4, success_rate_lb: 1.0, max_resampling_rounds: 1}"
    numbers = run_flow("smoke", [*overrides, bounds, "run.iterations=2"])
    assert [metrics["trajectories"] for metrics in numbers["training"]] == [0, 0]
    assert [metrics["groups/rejected"] for metrics in numbers["training"]] == [8, 8]
    assert "train" not in numbers["stages"]


@pytest.mark.parametrize(
    "options",
    [
        ["algorithm.critic={model: own}", "algorithm.kl={kl_ctl: 0.1, adaptive: true}"],
        ["algorithm.critic={}", "algorithm.kl={kl_ctl: 0.1, place: loss, reference: ema}"],
    ],
    ids=["own-critic", "value-head"],
)
def test_options_continue_from_their_checkpoints(overrides: list[str], tmp_path: Path, options: list[str]) -> None:
    """The states of critic, reference policy and controllers are stored, and a new trainer loads them."""
    settings = [*overrides, "algorithm.advantage={type: gae}", *options]
    run_flow("smoke", [*settings, "run.iterations=1"])
    numbers = run_flow("smoke", [*settings, "run.iterations=2"])
    assert numbers["iterations"] == 2
    assert numbers["training"][1]["trajectories"] == 16


def test_a_run_may_begin_with_a_policy_of_another_run(trained: list[str], tmp_path: Path) -> None:
    """The policy may be a checkpoint of the store, named by its URI: lineage leads into the other run."""
    policy, store = layout.checkpoint("smoke", 1), Store(f"{tmp_path}/var")
    run_flow("smoke", [*trained, "run.name=other", "run.iterations=0", f"policy={{path: {store.uri(policy)}}}"])
    first = checkpoints.open_checkpoint(store, layout.checkpoint("other", 0), tmp_path, state=True)
    canary = checkpoints.open_checkpoint(store, policy, tmp_path).canary
    assert canary.logprobs == pytest.approx(first.canary.logprobs, abs=1e-5)
    assert policy in first.manifest.parent_names
    assert first.state is None


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


@pytest.mark.long
@pytest.mark.parametrize("help_", ["exclude", "cap"])
def test_a_run_that_a_trajectory_has_stopped_goes_on(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, help_: str
) -> None:
    """An update that is not finite names the trajectory. The same run goes on without it, or with a bound.

    An older program has stored the trajectory.
    """
    settings = [*overrides, "run.iterations=1", "algorithm.behaviour_weight={cap: null}", "evaluation.every=9"]
    calls = itertools.count()

    def spoiled(*arguments: Any) -> Completion:
        made = completion_of(*arguments)
        return replace(made, logprobs=[-120.0 for _ in made.logprobs]) if next(calls) == 20 else made

    monkeypatch.setattr("tasks.inference.client.completion_of", spoiled)
    monkeypatch.setattr("tasks.rollout.admission.LOWEST_LOGPROB", -1e9)
    with pytest.raises(ValueError, match=r"tasks\.provenance exclude --ids FILE") as stopped:
        run_flow("smoke", settings)
    bad = re.findall(r"trajectories (smoke/\S+?):", str(stopped.value))
    assert len(bad) == 1
    if help_ == "exclude":
        store = Store(f"{tmp_path}/var")
        version = commit_exclusions(store, propose_ids(store, bad, tmp_path, "impossible logprobs").rows)
        numbers = run_flow("smoke", [*settings, f"problems.exclusions=[{version}]"])
        assert numbers["training"][0]["trajectories/excluded"] == 1
    else:
        assert run_flow("smoke", [*settings, "algorithm.behaviour_weight={cap: 5}"])["iterations"] == 1


AGENT = """
from tasks.agents.math_multi_turn import MathMultiTurnAgent

class PoliteAgent(MathMultiTurnAgent):
    def __init__(self, context, *, greeting: str, num_turns: int = 2):
        super().__init__(context, num_turns=num_turns, wrong_feedback=greeting)
"""


def test_an_agent_of_ones_own(overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's agent is a class in the user's file, named `module:Class`, with its own argument."""
    (tmp_path / "my_agents.py").write_text(AGENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = ["agent={type: 'my_agents:PoliteAgent', args: {greeting: 'Sorry. Try again.'}}"]
    version = rollout("smoke", [*overrides, *own], iteration=0)
    rows = list(datasets.trajectories(Store(f"{tmp_path}/var"), version, tmp_path))
    assert {row.agent for row in rows} == {"my_agents:PoliteAgent"}
    assert manifests.read(Store(f"{tmp_path}/var"), version).code.keys() == {"my_agents.py"}
    assert any(turn.feedback == "Sorry. Try again." for row in rows for turn in row.turns)
    with pytest.raises(ConfigError, match="did you mean 'greeting'"):
        rollout("smoke", [*overrides, "agent={type: 'my_agents:PoliteAgent', args: {greetin: x}}"], iteration=0)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy={path: ./no-such-folder}", "there is no no-such-folder/config.json"),
        ("policy={path: EMPTY}", "there is no .*empty/config.json"),
        ("policy={path: EMPTY/runs/x/checkpoints/000001}", "never committed"),
        ("problems.train={kind: jsonl, path: EMPTY/no.jsonl, preset: gsm8k}", "no.jsonl"),
    ],
)
def test_bad_inputs_stop_before_anything_is_trained(
    overrides: list[str], tmp_path: Path, override: str, message: str
) -> None:
    """The error names the input, and no checkpoint is left."""
    (tmp_path / "empty").mkdir()
    bad = override.replace("EMPTY", str(tmp_path / "empty"))
    base = [f"policy={{path: {tmp_path}}}"]
    with pytest.raises(ValueError, match=message):
        run_flow("smoke", [*overrides, *base, bad])
    assert not list((tmp_path / "var/runs/smoke").glob("checkpoints/*"))


def test_a_policy_without_a_chat_template_is_refused_before_servers_start(
    overrides: list[str], tmp_path: Path, policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a server takes minutes to start, so the policy is checked before."""
    from transformers import AutoTokenizer

    engine = WaitingEngine(0)
    monkeypatch.setattr(engine, "serve", lambda *_, **__: pytest.fail("a server was started"))
    monkeypatch.setattr("flows.run.resources.open_engine", opens(engine))
    folder = tmp_path / "base-model"
    shutil.copytree(policy_folder, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match="has no chat template: use an instruction-tuned model"):
        run_flow("smoke", [*overrides, f"policy={{path: {folder}}}"])
