"""Swaps of a real server in half precision: no false alarm, and nothing wrong stays unseen."""

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

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
from tests.inference.test_mixtures import SIZES
from tests.support.train_helpers import tiny_model

SWAPS = 200
HALF = INFERENCE.model_copy(update={"dtype": "bfloat16"})

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture
def model(policies: list[Checkpoint], tmp_path: Path) -> PreTrainedModel:
    """Return a random model with tied embeddings and biases, in folders for its versions and for wrong weights."""
    vocabulary = len(load_tokenizer(policies[0].model))
    model = tiny_model("qwen2", tied=True, vocab_size=vocabulary, initializer_range=0.1, **SIZES)
    for name in ("0", "1", "wrong"):
        shutil.copytree(policies[0].model, tmp_path / name)
        model.config.save_pretrained(tmp_path / name)
        save_file({key: weight.data for key, weight in model.named_parameters()}, tmp_path / name / "model.safetensors")
    return model


@pytest.fixture
def half(model: PreTrainedModel, tmp_path: Path) -> Iterator[Engine]:
    """Yield an engine for a server in bfloat16, which stays when a swap has failed."""
    server = Server(HALF, tmp_path / "vllm.log")
    try:
        server.start_serving(tmp_path / "0")
        server.wait_until_healthy()
        with Engine(HALF.model_copy(update={"urls": [server.url]}), Rollout(), tmp_path) as engine:
            yield engine
    finally:
        server.close()


def test_many_swaps_are_proven(
    half: Engine, model: PreTrainedModel, policies: list[Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In between, a version is not loaded at all, or each weight in turn stays an older one's, or is not in the files.

    The least updates, like Adam's, change about one of a thousand numbers after rounding.
    """
    weights: dict[str, Any] = dict(model.named_parameters())
    reload, instead = Client._reload, list[Path]()

    async def wrong(client: Client, _: Path, version: int) -> None:
        await (reload(client, instead.pop(), version) if instead else client.set_weight_version(version))

    for swap in range(SWAPS):
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        with torch.no_grad():
            for weight in weights.values():
                weight += (1e-6, 1e-5, 1e-4, 5e-3)[swap % 4] * torch.randn(weight.shape).sign()
        folder, version = tmp_path / str(swap % 2), layout.checkpoint("shared", 1000 + swap)
        save_file(weights, folder / "model.safetensors")
        canary = make_canary(model)
        newest = dataclasses.replace(policies[0], version=version, number=swap, model=folder, canary=canary)
        if swap % 4 in (2, 3) and swap > 4:
            if swap % 4 == 3:
                name = list(weights)[swap // 8 % len(weights)]
                mixed = {**weights, name: before[name]}
                if swap % 8 == 3:
                    del mixed[name]
                save_file(mixed, tmp_path / "wrong" / "model.safetensors")
                instead.append(tmp_path / "wrong")
            with monkeypatch.context() as patched:
                patched.setattr(Client, "_reload", wrong)
                with pytest.raises(InferenceError, match=r"does not serve .* it holds other weights in"):
                    half.serve(newest)
        half.serve(newest)
