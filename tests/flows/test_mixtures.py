"""A mixture end to end: sums, a calculator and a game, with agents, environments and scorers of their own."""

import json
from collections import Counter
from pathlib import Path

import pytest

from storage import layout
from storage.objects.store import Store
from storage.records import Trajectory
from storage.versions import datasets
from storage.versions.lineage import trained_on
from tasks.metrics.log import read_rows
from tests.conftest import INFERENCE
from tests.flows.test_flows import run_flow

HELD_OUT = "held_out: {kind: guess-number, split: held-out, count: 4}"
MEMBERS = f"""problems.train=[
    {{name: sums, weight: 2, source: {{kind: arithmetic, high: 9}}, reject_equal: true}},
    {{name: tools, source: {{kind: arithmetic, low: 10, high: 12}}, agent: {{type: openai, tools: [calculator]}}}},
    {{name: game, source: {{kind: guess-number, count: 30}}, {HELD_OUT}, environment: {{type: guess-number}},
      score: environment, agent: {{type: openai, args: {{arguments: {{num_turns: 2}}}}}}}}]"""
SETTINGS = [MEMBERS, "policy.path=math-mt-ppo/demo-mix", "agent.type=math-single-step", "agent.args={}"]
PLAYERS = {
    "sums": ("math-single-step", "math-verify"),
    "tools": ("openai", "math-verify"),
    "game": ("openai", "guess-number"),
}


@pytest.fixture
def settings(overrides: list[str]) -> list[str]:
    """Return overrides for a run with a vLLM server of its own: the session's has another vocabulary."""
    kept = [override for override in overrides if not override.startswith("inference.urls")]
    return [*kept, *SETTINGS, f"inference.extra_args={json.dumps(INFERENCE.extra_args)}"]


def rows_of(store: Store, run: str, iteration: int) -> list[Trajectory]:
    return list(datasets.trajectories(store, layout.trajectories(run, iteration), Path(store.root)))


def test_each_member_plays_and_is_scored_in_its_own_way(settings: list[str], tmp_path: Path) -> None:
    """Shares, players, verdicts and numbers by source; a filter of one member counts for it alone."""
    numbers = run_flow("smoke", settings)
    store = Store(f"{tmp_path}/var")
    for iteration in range(2):
        rows, (_, scores) = rows_of(store, "smoke", iteration), trained_on(store, "smoke", iteration)
        assert {row.source: (row.agent, row.environment) for row in rows} == PLAYERS
        groups = Counter(row.problem_id.partition("/")[0] for row in {row.problem_id: row for row in rows}.values())
        assert (groups["tools"], groups["game"]) == (1, 1)
        assert groups["sums"] >= 2  # equal groups are replaced
        rejected = {row.source for row in rows if row.status == "rejected"}
        assert rejected <= {"sums"}
        source = {row.trajectory_id: row.source for row in rows}
        said = {(row.trajectory_id, n): turn.verdict for row in rows for n, turn in enumerate(row.turns)}
        for score in datasets.rows(store, scores, tmp_path):
            if source[score["trajectory_id"]] == "game":
                assert score["verdict"] == said[score["trajectory_id"], score["turn"]]
    by_source = numbers["evaluations"][0]["by_source"]
    assert {name: own["episodes"] for name, own in by_source.items()} == {"arithmetic": 8, "game": 4}
    logged = {name for row in read_rows(store, "smoke") for name in row}
    assert {"eval/held-out/game/any_turn", "source/sums/episodes/rejected", "source/game/reward/mean"} <= logged
    assert json.loads(store.read("runs/smoke/run/manifest.json"))["config"]["score"]["type"]["game"] == "environment"
