"""A run whose scorer asks a reward model and whose algorithm asks a teacher, both on real servers of vLLM."""

import json
from pathlib import Path

import pytest

from configs import ConfigError
from flows.math_mt_ppo import math_mt_ppo
from flows.score import score
from storage import layout
from storage.maintenance.verify import verify
from storage.objects.store import Store
from storage.records import Annotation, to_score
from storage.version_names import AnnotationsVersion, select
from storage.versions import checkpoints, datasets, manifests
from tasks.train.replay import replay
from tests.support.chain_helpers import nonces
from tests.support.reward_model import forget_models, save_reward_model

pytestmark = pytest.mark.long

SERVER = "{max_model_len: 256, enforce_eager: true, extra_args: [--kv-cache-memory-bytes, '67108864'], path: '%s'}"


def test_models_are_asked_once_and_everything_names_them(overrides: list[str], tmp_path: Path) -> None:
    """Rewards are the model's numbers, checkpoints name what the teacher said, and replay and new scores ask nobody."""
    math_mt_ppo("smoke", [*overrides, "run.name=taught", "run.iterations=0"])
    store, cache = Store(f"{tmp_path}/var"), tmp_path / "cache"
    teacher = layout.checkpoint("taught", 0)
    reward = save_reward_model(checkpoints.open_checkpoint(store, teacher, cache).model, tmp_path / "reward")
    models = [f"models.teacher={SERVER % store.uri(teacher)}", f"models.reward={SERVER % reward}"]
    knobs = [*overrides, "algorithm.type=opd", "score.type=reward-model", *models]
    math_mt_ppo("smoke", knobs)

    trained = manifests.read(store, layout.checkpoint("smoke", 2))
    (taught,) = select(AnnotationsVersion, trained.parent_names)
    trajectories = {
        row.trajectory_id: row for row in datasets.trajectories(store, layout.trajectories("smoke", 1), cache)
    }
    for row in datasets.rows(store, taught, cache):
        assert len(row["logprobs"]) == len(trajectories[row["trajectory_id"]].token_ids)
    assert set(trained.code) == {"models.teacher", "models.reward"}
    (scored,) = (name for name in trained.parent_names if "/scores/" in name)
    (asked,) = select(AnnotationsVersion, manifests.read(store, scored).parent_names)
    said = {(row.trajectory_id, row.turn): row for row in (Annotation(**r) for r in datasets.rows(store, asked, cache))}
    assert {row.model for row in said.values()} == {trained.code["models.reward"]}
    for given in map(to_score, datasets.rows(store, scored, cache)):
        assert given.reward == pytest.approx(said[given.trajectory_id, given.turn].value)

    before = nonces(tmp_path)
    math_mt_ppo("smoke", knobs)
    assert nonces(tmp_path) == before
    assert [made.verdict for made in replay(store, "smoke@0..2", str(cache), lambda _: None)] == ["the same bits"] * 2

    other = score("smoke", [*knobs, "score.args={reward-model: {success_above: -9}}"], iteration=1)
    assert other != scored
    assert {row.verdict for row in map(to_score, datasets.rows(store, other, cache))} == {"correct"}
    assert select(AnnotationsVersion, manifests.read(store, other).parent_names) == [asked]

    assert verify(store, [trained.version, scored, other], deep=True).findings == []

    values = json.loads((reward / "config.json").read_bytes())
    (reward / "config.json").write_text(json.dumps(values | {"rms_norm_eps": 1e-3}))
    forget_models()
    with pytest.raises(ConfigError, match=r"played with other code or models of yours .*models\.reward"):
        math_mt_ppo("smoke", [*knobs, "run.iterations=3"])
