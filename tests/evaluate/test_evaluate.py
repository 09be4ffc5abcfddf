"""The evaluate flow on a real engine, and how a run uses the results of earlier runs."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.evaluate import HELD_OUT
from flows.evaluate import evaluate
from flows.math_mt_ppo import math_mt_ppo
from flows.run import progress
from storage import layout
from storage.errors import StorageError
from storage.maintenance.verify import verify
from storage.objects.store import Store
from storage.version_names import ScoresVersion
from storage.versions import aliases, datasets, manifests

OWN = "evaluation.sets={own: {kind: jsonl, path: OWN, fields: {prompt: prompt, solutions: answer}}}"


def test_two_policies_on_two_sets(trained: list[str], tmp_path: Path) -> None:
    """Greedy and sampled episodes have their numbers; two policies are compared on the same problems.

    The evaluations are stored, and a second call plays nothing again.
    """
    own = tmp_path / "own.jsonl"
    own.write_text("".join(json.dumps({"prompt": f"What is {n} + 3?", "answer": n + 3}) + "\n" for n in range(4)))
    settings = [*trained, OWN.replace("OWN", str(own)), "evaluation.samples=4"]
    store, first = Store(f"{tmp_path}/var"), layout.checkpoint("smoke", 0)
    aliases.move(store, "champion", layout.checkpoint("smoke", 1), None)
    numbers = evaluate("smoke", settings, policy="champion", against=first)
    assert set(numbers) == {HELD_OUT, "own"}
    measured = numbers["own"][layout.checkpoint("smoke", 1)]
    assert measured["episodes"] == 4
    assert measured["sampled_episodes"] == 16
    assert set(measured["pass_at"]) == {"1", "2", "4"}
    assert numbers["own"]["comparison"]["problems"] == 4

    scores = ScoresVersion(measured["scores"][0])
    assert manifests.read(store, scores).metrics["first_turn"] == measured["first_turn"]
    assert scores.evaluation
    played_by = {row.policy for row in datasets.trajectories(store, scores.evaluation, tmp_path)}
    assert played_by == {layout.evaluated_policy(scores)}
    assert verify(store, [scores], deep=True).findings == []
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("manifest.json")}
    assert evaluate("smoke", settings, policy="champion", against=first) == numbers
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("manifest.json")} == before


def test_another_protocol_is_another_evaluation(trained: list[str], tmp_path: Path) -> None:
    """An evaluation with one turn instead of two does not reuse the old numbers."""
    two = evaluate("smoke", trained)[HELD_OUT]
    one = evaluate("smoke", [*trained, "agent.args.num_turns=1"])[HELD_OUT]
    policy = layout.checkpoint("smoke", 1)
    assert two[policy]["scores"] != one[policy]["scores"]
    assert len(one[policy]["by_turn"]) == 1


def test_bad_wanteds_say_what_there_is(trained: list[str]) -> None:
    for wanted, message in (
        ({"policy": "nobody"}, "nobody was never committed"),
        ({"policy": "runs/smoke/trajectories/000000"}, "is a trajectories version, not a checkpoint"),
        ({"sets": "gsm"}, "there is no evaluation set 'gsm'; there are held-out"),
        ({"against": "smoke/latest"}, "are the same policy, runs/smoke/checkpoints/000001"),
    ):
        with pytest.raises((StorageError, ValueError), match=message):
            evaluate("smoke", trained, **wanted)


def test_a_run_draws_by_the_results_of_earlier_runs(
    trained: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The curriculum is a version made from the results of earlier runs; suspects left out are never drawn."""
    monkeypatch.setattr("tasks.problems.curriculum.LEAST_EPISODES", 4)
    store, sampling = Store(f"{tmp_path}/var"), "problems.sampling={prefer: middle, leave_out_suspects: true}"
    math_mt_ppo("smoke", [*trained, "run.name=second", "run.iterations=1", sampling])
    entries = list(datasets.rows(store, layout.curriculum("second"), tmp_path))
    parents = [parent.version for parent in manifests.read(store, layout.curriculum("second")).parents]
    assert layout.checkpoint("smoke", 1) in parents
    known = {entry["problem_id"] for entry in entries if entry["standing"] != "unknown"}
    played = {row.problem_id for row in datasets.trajectories(store, layout.trajectories("smoke", 0), tmp_path)}
    assert known == played
    left_out = {entry["problem_id"] for entry in entries if entry["weight"] == 0}
    assert left_out == {entry["problem_id"] for entry in entries if entry["standing"] == "suspect"}
    drawn = {row.problem_id for row in datasets.trajectories(store, layout.trajectories("second", 0), tmp_path)}
    assert drawn.isdisjoint(left_out)


def test_a_budget_ends_a_run_early(overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run stops after the iteration that used the budget; a larger budget continues it."""
    store, four = Store(f"{tmp_path}/var"), [*overrides, "run.iterations=4"]
    math_mt_ppo("smoke", [*four, "run.max_tokens=1"])
    assert manifests.committed(store, layout.checkpoint("smoke", 1))
    assert not manifests.committed(store, layout.checkpoint("smoke", 2))
    with monkeypatch.context() as patch:  # each reading of the clock is a minute later
        patch.setattr(progress, "time", SimpleNamespace(monotonic=itertools.count(step=60).__next__))
        math_mt_ppo("smoke", [*four, "run.max_minutes=1.5"])
    assert manifests.committed(store, layout.checkpoint("smoke", 2))  # this iteration had begun
    assert not manifests.committed(store, layout.checkpoint("smoke", 3))
    math_mt_ppo("smoke", [*four, "run.max_tokens=1000000", "run.max_minutes=60"])
    assert manifests.committed(store, layout.checkpoint("smoke", 4))
