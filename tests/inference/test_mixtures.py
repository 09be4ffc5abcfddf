"""A running vLLM server swaps in mixtures of experts, from files in which each expert has its name.

That ranks write such files is tested in `tests/train/test_mesh.py`.
"""

from pathlib import Path
from typing import Any

import pytest

from configs.rollout import Rollout
from storage.objects.store import Store
from tasks.agents.chat import load_tokenizer
from tasks.inference.api import GenerationConfig
from tasks.inference.engine import Engine
from tests.conftest import INFERENCE, commit_policy
from tests.inference.test_engine import generate, own_logprobs
from tests.support.train_helpers import tiny_model

SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""Sizes of layers that vLLM's CPU backend knows."""


@pytest.mark.long
@pytest.mark.slow
def test_a_running_server_loads_mixtures(policy_folder: Path, store: Store, tmp_path: Path) -> None:
    """Their weights are in several files, as ranks write them."""
    tokenizer, folder = load_tokenizer(policy_folder), tmp_path / "mixture"
    model = tiny_model("qwen3_moe", **SIZES, vocab_size=len(tokenizer), moe_intermediate_size=48, initializer_range=0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    policies = [commit_policy(store, number, folder, 0.01 * number, max_shard_size="100KB") for number in range(3)]
    assert len([*policies[0].model.glob("*.safetensors")]) > 1
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
        assert len({tuple(policy.canary.logprobs) for policy in policies}) == 3
