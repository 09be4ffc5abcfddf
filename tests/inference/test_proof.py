"""Five hundred swaps of a real server in half precision: no false alarm, and nothing wrong stays unseen."""

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from configs.rollout import Rollout
from storage import layout
from storage.versions.checkpoints import Checkpoint
from tasks.agents.chat import load_tokenizer
from tasks.inference.api import InferenceError
from tasks.inference.client import Client
from tasks.inference.engine import Engine
from tasks.inference.server import Server
from tasks.train.policy import make_canary
from tests.conftest import INFERENCE

SWAPS = 500
HALF = INFERENCE.model_copy(update={"dtype": "bfloat16"})

pytestmark = [pytest.mark.slow, pytest.mark.long]


class Policy:
    """A random model with tied embeddings and biases, whose updates are like Adam's; its newest version is in files."""

    def __init__(self, like: Checkpoint, folder: Path) -> None:
        self._like, self._folders = like, [folder / name for name in ("even", "odd", "wrong")]
        for each in self._folders:
            shutil.copytree(like.model, each)
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 128}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
        vocabulary = len(load_tokenizer(like.model))
        self._model = Qwen2ForCausalLM(
            Qwen2Config(vocab_size=vocabulary, initializer_range=0.1, **sizes, **heads)
        ).eval()
        for each in self._folders:
            self._model.config.save_pretrained(each)
        self.number = 0
        self.update(0)

    @property
    def weights(self) -> dict[str, Tensor]:
        return dict(self._model.named_parameters())

    def update(self, lr: float) -> Checkpoint:
        """Move each weight by `lr` up or down; return the version."""
        self.before = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.number += 1
        with torch.no_grad():
            for weight in self.weights.values():
                weight += lr * torch.randn(weight.shape).sign()
        folder = self._folders[self.number % 2]
        save_file(self.weights, folder / "model.safetensors")
        version = layout.checkpoint("shared", 1000 + self.number)
        canary = make_canary(self._model)
        return dataclasses.replace(self._like, version=version, number=self.number, model=folder, canary=canary)

    def wrong(self, weights: dict[str, Tensor]) -> Path:
        """Write other weights beside those of the newest version; return their folder."""
        save_file(weights, self._folders[2] / "model.safetensors")
        return self._folders[2]


@pytest.fixture
def policy(policies: list[Checkpoint], tmp_path: Path) -> Policy:
    return Policy(policies[0], tmp_path)


@pytest.fixture
def half(policy: Policy, tmp_path: Path) -> Iterator[Engine]:
    """Yield an engine for a server in bfloat16, which stays when a swap has failed."""
    server = Server(HALF, tmp_path / "vllm.log")
    try:
        server.start_serving(policy.update(0).model)
        server.wait_until_healthy()
        with Engine(HALF.model_copy(update={"urls": [server.url]}), Rollout(), tmp_path) as engine:
            yield engine
    finally:
        server.close()


def test_five_hundred_swaps_are_proven(half: Engine, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """In between, a version is not loaded at all, or each weight in turn stays an older one's, or is not in the files.

    The least updates change about one of a thousand numbers after rounding.
    """
    names, reload = list(policy.weights), Client._reload
    instead: list[Path] = []

    async def wrong(client: Client, _: Path, version: int) -> None:
        await (reload(client, instead.pop(), version) if instead else client.set_weight_version(version))

    half.serve(policy.update(0))
    for swap in range(SWAPS):
        newest = policy.update((1e-6, 1e-5, 1e-4, 5e-3)[swap % 4])
        if swap % 8 == 3:
            name = names[swap // 16 % len(names)]
            mixed = policy.weights | {name: policy.before[name]}
            if swap % 16 == 3:
                del mixed[name]
            instead.append(policy.wrong(mixed))
        if swap % 8 in (3, 4):
            with monkeypatch.context() as patched:
                patched.setattr(Client, "_reload", wrong)
                with pytest.raises(InferenceError, match=r"does not serve .* it holds other weights in"):
                    half.serve(newest)
        half.serve(newest)
    assert len(half.history) == 1 + SWAPS + SWAPS // 4
