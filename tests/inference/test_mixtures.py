"""Mixtures of experts go from two ranks to a running vLLM server, by files in which each expert has its name."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from configs.rollout import Rollout
from configs.train import Optimizer
from storage import layout
from storage.objects.store import Store
from storage.versions import checkpoints
from storage.versions.checkpoints import Checkpoint
from storage.versions.drafts import Provenance
from storage.versions.weights import load_model
from tasks.agents.chat import load_tokenizer
from tasks.inference.api import GenerationConfig
from tasks.inference.engine import Engine
from tasks.train.mesh import Mesh
from tasks.train.policy import make_canary
from tasks.train.train_state import load_train_state
from tasks.train.trainer import Trainer
from tests.conftest import INFERENCE
from tests.inference.test_engine import generate, own_logprobs
from tests.support.rank_processes import run_ranks
from tests.support.train_helpers import make_config, random_rows, tiny_model

UPDATES = 2


SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""Sizes of layers that vLLM's CPU backend knows."""


def update_on_ranks(folder: Path, out: Path) -> None:
    """Take updates; each rank writes its part of the weights after every one."""
    config = make_config(optimizer=Optimizer(lr=1e-2), advantage={}, parallel={"shard": dist.get_world_size()})
    mesh = Mesh.of(config.train.parallel, "cpu", 60, ["a"] * 2)
    trainer = Trainer(load_train_state(config, folder, mesh=mesh))
    for update in range(UPDATES):
        trainer.update(*random_rows(vocabulary=16, seed=update), version=2)
        trainer.save(out / str(update + 1) / "model", out / str(update + 1) / "state")


def commit(store: Store, number: int, folder: Path, dense: Path, scratch: Path) -> Checkpoint:
    load_tokenizer(dense).save_pretrained(folder)
    key = layout.checkpoint("mixture", number)
    checkpoints.commit(store, key, folder, None, make_canary(load_model(folder)), Provenance(config={}), [], {})
    return checkpoints.open_checkpoint(store, key, scratch)


@pytest.mark.long
@pytest.mark.slow
def test_a_running_server_loads_what_two_ranks_have_trained(policy_folder: Path, tmp_path: Path) -> None:
    sizes = {**SIZES, "vocab_size": len(load_tokenizer(policy_folder)), "moe_intermediate_size": 48}
    tiny_model("qwen3_moe", **sizes, initializer_range=0.1).save_pretrained(tmp_path / "0" / "model")
    run_ranks(2, update_on_ranks, tmp_path / "0" / "model", tmp_path, log=tmp_path / "log")
    store = Store(str(tmp_path / "store"))
    policies = [
        commit(store, number, tmp_path / str(number) / "model", policy_folder, tmp_path / "cache")
        for number in range(UPDATES + 1)
    ]
    with Engine(INFERENCE, Rollout(), tmp_path) as engine:
        engine.serve(policies[0])
        (server,) = engine.servers
        first = server.pid
        for policy in [*policies[1:], policies[0]]:
            engine.serve(policy)  # proves it by the canary
            completion = generate(engine, GenerationConfig(max_new_tokens=16))[0]
            assert completion.logprobs == pytest.approx(own_logprobs(policy, completion, 1.0), abs=1e-4)
            assert set(completion.versions) == {policy.number}
        assert server.pid == first
        assert len({tuple(policy.canary.logprobs) for policy in policies}) == UPDATES + 1
