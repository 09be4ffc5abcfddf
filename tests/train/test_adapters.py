"""Adapters (`policy.lora`): what is trained, stored, merged and served is one policy, and foreign ones are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from configs import ConfigError, load
from configs.policy import LoRA
from storage.errors import DamagedError
from storage.versions.model_files import ADAPTER_FILES, read_adapter
from storage.versions.weights import load_model, make_adapter, merge, stored_name
from tasks.train.linear import use_onednn
from tasks.train.passes import logprob_scorer, score_action_tokens
from tasks.train.policy import trained
from tests.support.train_helpers import (
    GAE,
    SMALL,
    gradients,
    is_unchanged,
    make_trainer,
    random_rows,
    save_random_adapter,
    save_tiny,
    weights,
)

CONFIG, WEIGHTS = ADAPTER_FILES
SCALE = SMALL.alpha / SMALL.rank


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), tied=request.param)


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    return save_random_adapter(model, tmp_path / "adapter")


@torch.no_grad()
def logits(model: Any) -> Any:
    return model(torch.arange(6, 30)[None]).logits


def test_a_new_adapter_changes_nothing(model: Path, tmp_path: Path) -> None:
    """Policy version 0 is its base, bit for bit, and the seed decides the rest of the adapter."""
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        make_adapter(load_model(model), SMALL, seed, tmp_path / name)
    assert torch.equal(logits(load_model(model, tmp_path / "one")), logits(load_model(model)))
    one, same, other = ((tmp_path / name / WEIGHTS).read_bytes() for name in ("one", "same", "other"))
    assert one == same != other
    assert read_adapter(tmp_path / "one") == SMALL


def test_attached_merged_and_in_peft_it_is_one_policy(model: Path, adapter: Path) -> None:
    """peft reads the folder as it is, onto the base; a merged model has the base's parameters and no adapter."""
    attached, merged = load_model(model, adapter), load_model(model, adapter)
    merge(merged)
    in_peft = PeftModel.from_pretrained(load_model(model), adapter)
    expected = logits(attached)
    torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(logits(in_peft), expected, atol=1e-5, rtol=0)
    assert (expected - logits(load_model(model))).abs().max() > 0.1
    assert [*merged.state_dict()] == [*load_model(model).state_dict()]


@pytest.mark.parametrize("bias", [False, True])
def test_under_autocast_a_layer_computes_what_peft_does(bias: bool) -> None:
    """Its output and gradients are those of peft's own layer in float32, up to bfloat16's 8 bits."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(24, 72, bias=bias)), torch.randn(2, 5, 24, requires_grad=True)
    layer: Any = inject_adapter_in_model(LoraConfig(r=4, lora_alpha=12, target_modules=["0"]), model).get_submodule("0")
    nn.init.normal_(layer.lora_B["default"].weight)
    inputs = [x, layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    along = torch.randn(2, 5, 72)

    def results() -> list[Tensor]:
        output = layer(x).float()
        return [output.detach(), *torch.autograd.grad((output * along).sum(), inputs)]

    exact = results()
    use_onednn(model)
    torch.testing.assert_close(results(), exact, atol=1e-5, rtol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        rounded = results()
    for one, other in zip(rounded, exact, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.01 * other.norm()


def test_the_gradient_is_that_of_the_weights(model: Path, adapter: Path, tmp_path: Path) -> None:
    """With G as the gradient of a merged weight, that of B is `scale G A^T`, and that of A is `scale B^T G`."""
    merged = load_model(model, adapter)
    merge(merged)
    merged.save_pretrained(tmp_path / "merged")
    whole, adapted = make_trainer(tmp_path / "merged"), make_trainer(model, adapter=adapter)
    for trainer in (whole, adapted):
        trainer.update(*random_rows(), version=2)
    found, of_weights, stored = gradients(adapted), gradients(whole), load_file(adapter / WEIGHTS)
    assert len(found) == 2 * 2 * len(SMALL.targets)
    largest = max(gradient.abs().max() for gradient in found.values())
    for name, gradient in found.items():
        layer, _, part = name.removesuffix(".default.weight").rpartition(".")
        a, b = (stored[stored_name(f"{layer}.{each}.default.weight")] for each in ("lora_A", "lora_B"))
        whole_gradient = of_weights[f"{layer}.weight"]
        expected = SCALE * (b.T @ whole_gradient if part == "lora_A" else whole_gradient @ a.T)
        torch.testing.assert_close(gradient, expected, atol=1e-4 * float(largest), rtol=0)


@pytest.mark.parametrize("options", [{}, {**GAE, "critic": {}}, {"gradient_checkpointing": True}], ids=str)
def test_only_the_adapter_is_trained_and_stored(
    model: Path, adapter: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """The base stays as it is, bit for bit; the state has moments of the adapter, with which training continues."""
    trainer = make_trainer(model, adapter=adapter, **options)
    before = weights(trainer)
    trainer.update(*random_rows(seed=1), version=2)
    changed = [name for name, value in weights(trainer).items() if not torch.equal(value, before[name])]
    assert sorted(changed) == sorted(trained(trainer.state.model))
    trainer.save(tmp_path / "next", tmp_path / "state")
    assert sorted(path.name for path in (tmp_path / "next").iterdir()) == sorted(ADAPTER_FILES)
    assert load_file(tmp_path / "next" / WEIGHTS).keys() == load_file(adapter / WEIGHTS).keys()
    moments = [name for name in load_file(tmp_path / "state" / "optimizer.safetensors") if name.startswith("exp_avg/")]
    assert len(moments) == len(changed)
    again = make_trainer(model, state=tmp_path / "state", adapter=tmp_path / "next", **options)
    for continued in (trainer, again):
        continued.update(*random_rows(seed=2), version=2)
    assert is_unchanged(again, weights(trainer))


def test_the_reference_is_the_policy_without_its_adapter(model: Path, adapter: Path) -> None:
    """There is no second model, and the adapter is on again afterwards."""
    trainer = make_trainer(model, adapter=adapter, kl={"kl_ctl": 0.1})
    state, canary = trainer.state, trainer.canary()
    samples = trainer._built(*random_rows())
    scorers = state.reference_scorer(), logprob_scorer(load_model(model), 1.0)
    found, expected = (score_action_tokens(scorer, samples, [0, 1], state.batching) for scorer in scorers if scorer)
    assert state.reference is None
    for index in (0, 1):
        np.testing.assert_allclose(found[index], expected[index], atol=1e-6)
    assert trainer.canary() == canary


def says(**values: Any) -> Callable[[Path], object]:
    """Return a change of adapter_config.json."""
    return lambda folder: (folder / CONFIG).write_text(json.dumps(json.loads((folder / CONFIG).read_text()) | values))


def holds(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[Path], object]:
    """Return a change of the weights."""
    return lambda folder: save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)


A = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a path": (says(base_model_name_or_path="/home/zoe/model"), "base_model_name_or_path='/home/zoe/model'"),
    "more weights": (says(modules_to_save=["lm_head"]), "modules_to_save"),
    "dropout": (says(lora_dropout=0.5), "lora_dropout=0.5"),
    "a pattern": (says(target_modules=".*"), "is not the configuration of an adapter"),
    "a pickle": (lambda folder: (folder / "adapter_model.bin").write_bytes(b""), "adapter_model.bin should not"),
    "another rank": (says(r=2), "the adapter of another model"),
    "a weight less": (
        holds(lambda tensors: {n: tensors[n] for n in tensors if n != A}),
        f"another model: {A} is not there",
    ),
    "another width": (holds(lambda tensors: tensors | {A: torch.zeros(3, 31)}), f"another model: {A}"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_not_an_adapter_of_the_model_is_refused(case: str, model: Path, adapter: Path) -> None:
    """A library would follow a path, load a pickle, or leave out what it does not find."""
    damage, problem = HOSTILE[case]
    damage(adapter)
    with pytest.raises((DamagedError, ValueError)) as raised:
        load_model(model, adapter)
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["policy.lora.rank=0"], "policy.lora.rank"),
        (["policy.lora.rank=513"], "512"),
        (["policy.lora.targets=[]"], "policy.lora.targets"),
        (["policy.lora.targets=[q_proj,q_proj]"], "twice"),
        (["policy.lora={}", "algorithm.kl.kl_ctl=0.1", "algorithm.kl.reference=ema"], "use fixed"),
        (["policy.lora={}", "inference.extra_args=[--max-lora-rank,'1']"], "--max-lora-rank is refused"),
    ],
)
def test_knobs_that_cannot_be_right_are_refused(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load("smoke", overrides)


def test_targets_that_name_nothing_are_named(tmp_path: Path) -> None:
    """So are those that exist; the output layer is none of them, since servers take no adapter for it."""
    model = load_model(save_tiny(tmp_path))
    with pytest.raises(ValueError, match=r"is called q_prj, lm_head\. There are down_proj, gate_proj"):
        make_adapter(model, LoRA(targets=["q_proj", "q_prj", "lm_head"]), 1, tmp_path / "adapter")
