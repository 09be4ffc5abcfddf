"""The trainer: updates are reproducible bit for bit, and broken numbers take no step."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from configs import load
from configs.train import Optimizer
from tasks.train.optimizer import make_adamw
from tests.support.train_helpers import (
    EVERYTHING,
    GAE,
    gradients,
    is_unchanged,
    make_scores,
    make_trainer,
    make_trajectory,
    random_rows,
    save_tiny,
    tiny_model,
    weights,
)


@pytest.mark.parametrize("options", [{**EVERYTHING, "epochs": 2}, {}, {**GAE, "critic": {}}], ids=len)
def test_a_stored_state_continues_bit_for_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    """Stored state and data give the same bits as an uninterrupted run: weights, moments, draws and learning rates.

    Neither what else draws nor the order of rows matters: shards are written as episodes end, and training sorts.
    """
    folder, knobs = save_tiny(tmp_path / "start"), {"minibatches": 2, "micro_batch_tokens": 60, **options}
    knobs["optimizer"] = Optimizer(lr=1e-3, schedule="cosine", warmup_steps=6, max_grad_norm=1e9)
    knobs["run"] = load("smoke", ["run.seed=1", "run.iterations=8"]).run
    whole, parts = make_trainer(folder, **knobs), make_trainer(folder, **knobs)
    for number in (1, 2):
        torch.rand(1)
        rows, scores = random_rows(seed=number)
        for trainer, name, step in ((whole, "whole", 1), (parts, "parts", -1)):
            trainer.update(rows[::step], scores[::step], version=number + 1)
            trainer.save(tmp_path / f"{name}{number}", tmp_path / f"{name}{number}" / "state")
        saved = tmp_path / f"parts{number}"
        parts = make_trainer(saved, state=saved / "state", version_0=folder, **knobs)
        ours, theirs = (tmp_path / f"{name}{number}" for name in ("whole", "parts"))
        names = sorted(str(path.relative_to(ours)) for path in ours.rglob("*") if path.is_file())
        assert names == sorted(str(path.relative_to(theirs)) for path in theirs.rglob("*") if path.is_file())
        assert [name for name in names if (ours / name).read_bytes() != (theirs / name).read_bytes()] == []
    files = {path.name for path in (ours / "state").iterdir()}
    assert ("critic.safetensors" in files, "reference.safetensors" in files) == ("critic" in options, "kl" in options)


def test_saved_folder_holds_what_the_contract_says(tmp_path: Path) -> None:
    """A plain transformers folder with float32 weights in one file, and a state without pickles.

    Loaded weights are copied to aligned memory: on the unaligned mapped file, vector code may sum in another order.
    """
    trainer = make_trainer(save_tiny(tmp_path / "start"))
    assert {parameter.data_ptr() % 64 for parameter in trainer.state.model.parameters()} == {0}
    trainer.update(*random_rows(), version=2)
    trainer.save(tmp_path / "model", tmp_path / "state")
    files = {path.name for path in (tmp_path / "model").iterdir()}
    assert files == {"config.json", "generation_config.json", "model.safetensors"}
    assert {tensor.dtype for tensor in load_file(tmp_path / "model" / "model.safetensors").values()} == {torch.float32}
    assert {path.name for path in (tmp_path / "state").iterdir()} == {"optimizer.safetensors", "state.json"}
    assert json.loads((tmp_path / "state" / "state.json").read_text()) == {"steps": 1, "kl_ctl": 0.0}


@pytest.mark.parametrize("tied", [False, True])
def test_canaries_of_other_weights_differ(tmp_path: Path, tied: bool) -> None:
    """Equal weights give equal canaries, also after save and load and for any global RNG; a step changes the canary."""
    trainer = make_trainer(save_tiny(tmp_path / "start", tied=tied))
    before = trainer.canary()
    torch.rand(1)
    assert trainer.canary() == before
    trainer.update(*random_rows(), version=2)
    after = trainer.canary()
    assert after.token_ids == before.token_ids
    assert max(abs(a - b) for a, b in zip(after.logprobs, before.logprobs, strict=True)) > 1e-4
    trainer.save(tmp_path / "model", tmp_path / "state")
    assert make_trainer(tmp_path / "model").canary() == after


def test_canary_holds_the_models_logprobs(tmp_path: Path) -> None:
    """A canary has 64 ids and 63 logprobs at temperature 1, not at the training temperature, and in float32.

    Version 0's is made without a trainer, so rounding by autocast would look like an update.
    """
    canary = make_trainer(save_tiny(tmp_path), temperature=0.5).canary()
    assert make_trainer(tmp_path, autocast="bfloat16").canary() == canary
    ids = torch.tensor(canary.token_ids)
    logprobs = tiny_model()(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    assert (len(canary.token_ids), len(canary.logprobs)) == (64, 63)
    torch.testing.assert_close(torch.tensor(canary.logprobs), logprobs, atol=1e-5, rtol=0)


def test_gradients_are_clipped(tmp_path: Path) -> None:
    """The step uses the clipped norm; the metric reports the norm before clipping."""
    trainer = make_trainer(save_tiny(tmp_path), Optimizer(max_grad_norm=1e-3))
    metrics = trainer.update(*random_rows(), version=2)
    assert torch.nn.utils.get_total_norm(list(gradients(trainer).values())).item() == pytest.approx(1e-3, rel=1e-2)
    assert metrics["grad_norm"] > 0.01


def test_gradient_that_is_not_a_number_spares_the_weights(tmp_path: Path) -> None:
    """If only the backward pass fails, the message names all trajectories of the minibatch."""
    trainer = make_trainer(save_tiny(tmp_path))
    before = weights(trainer)
    next(trainer.state.model.parameters()).register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(ValueError, match=r"infinite gradients with the trajectories t000, t001, .* and 11 more"):
        trainer.update(*random_rows(), version=2)
    assert is_unchanged(trainer, before)


def test_an_update_that_options_leave_empty_keeps_the_policy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If filters reject every group, the run goes on with an unchanged policy; if all episodes failed, it ends."""
    trainer = make_trainer(save_tiny(tmp_path), mask_truncated=True)
    before = weights(trainer)
    cut = make_trajectory("cut", [[10]], status="truncated", finish_reason="length", unplayed_turns=0)
    metrics = trainer.update([make_trajectory("t", [[10]], status="rejected"), cut], make_scores("cut", 1), version=0)
    assert set(metrics.values()) == {0.0}
    assert is_unchanged(trainer, before)
    assert "nothing to train on" in caplog.text
    with pytest.raises(ValueError, match="none of 1 trajectories can be trained on: all failed"):
        trainer.update([make_trajectory("t", [[10]], status="failed")], [], version=0)
    trainer.update([make_trajectory("t", [[10]], status="failed")], [], version=0, chosen=True)  # a part of stored data


def test_what_graders_failed_on_is_left_out_and_an_alarm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is counted, and named if it is more than a few: a policy may make graders fail."""
    save_tiny(tmp_path)
    rows = [make_trajectory(f"t{number}", [[10, 11]]) for number in range(60)]
    scores = [score for number in range(60) for score in make_scores(f"t{number}", number % 2)]
    for failed in (1, 2, 60):
        caplog.clear()
        now = [replace(score, verdict="error", reason="no number") for score in scores[:failed]] + scores[failed:]
        metrics = make_trainer(tmp_path).update(rows, now, version=0)
        assert (metrics["trajectories"], metrics["trajectories/failed_verdict"]) == (60 - failed, failed)
        told = f"ALARM: graders failed on {failed} of 60 trajectories, such as t0 (no number)"
        assert (told in caplog.text) == (failed > 1)


def test_only_matrices_decay() -> None:
    """Without gradients a matrix shrinks by lr * weight_decay, while norms and biases stay unchanged."""
    matrix, bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    adamw = make_adamw({"policy": [matrix, bias]}, Optimizer(lr=0.1, weight_decay=0.5))
    matrix.grad, bias.grad = torch.zeros(2, 2), torch.zeros(2)
    adamw.step()
    assert (matrix.tolist(), bias.tolist()) == ([[pytest.approx(0.95)] * 2] * 2, [1.0, 1.0])


def test_incomplete_folders_are_refused(tmp_path: Path) -> None:
    """Refused are: no model, missing weights (which transformers would invent), a state without its critic."""
    with pytest.raises(ValueError, match=r"no config\.json"):
        make_trainer(tmp_path)
    trainer = make_trainer(save_tiny(tmp_path / "qwen3"))
    trainer.update(*random_rows(), version=2)
    trainer.save(tmp_path / "model", tmp_path / "state")
    with pytest.raises(FileNotFoundError, match=r"critic\.safetensors"):
        make_trainer(tmp_path / "model", state=tmp_path / "state", **GAE, critic={})
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("lm_head.weight")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match="there are no weights lm_head.weight"):
        make_trainer(tmp_path / "model")
