"""Learning rates: warm-up over steps, decay over the updates of the run, for policy and critic."""

from pathlib import Path
from typing import Literal

import pytest

from configs.train import Optimizer
from tasks.train.optimizer import factor
from tasks.train.trainer import Trainer
from tests.support.train_helpers import GAE, is_unchanged, make_config, random_rows, save_tiny, weights

Schedule = Literal["constant", "linear", "cosine"]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [1, 1, 1, 1, 1]), ("linear", [1, 0.75, 0.5, 0.25, 0]), ("cosine", [1, 0.854, 0.5, 0.146, 0])],
)
def test_decay_by_hand(schedule: Schedule, expected: list[float]) -> None:
    """Four updates, and one after the end of the run as it was."""
    knobs = Optimizer(schedule=schedule)
    assert [factor(knobs, update, 4, 9) for update in range(5)] == pytest.approx(expected, abs=1e-3)


def test_warm_up_multiplies_the_decay() -> None:
    """The example of the module: four updates of two steps."""
    knobs = Optimizer(schedule="linear", warmup_steps=2)
    found = [factor(knobs, step // 2, 4, step + 1) for step in range(8)]
    assert found == [0.5, 1, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25]


def test_continuing_keeps_every_bit(tmp_path: Path) -> None:
    """Four updates in one process, and two and two, with policy and critic: the same rates and weights."""
    folder, knobs = save_tiny(tmp_path / "policy"), Optimizer(lr=1e-3, schedule="cosine", warmup_steps=3)

    def trainer() -> Trainer:
        config = make_config(optimizer=knobs, critic={"model": "own", "lr": 2e-3}, minibatches=2, **GAE)
        return Trainer(config.model_copy(update={"run": config.run.model_copy(update={"iterations": 4})}))

    whole, parts, rates = trainer(), trainer(), list[float]()
    whole.load(folder)
    parts.load(folder)
    for update in range(4):
        metrics = whole.update(*random_rows(seed=update, newest=update), version=update)
        rates.append(metrics["lr"])
        critic = whole._train_state.critic
        assert critic
        assert critic.adamw
        assert critic.adamw.param_groups[0]["lr"] == pytest.approx(2 * metrics["lr"])
        if update == 2:
            parts.save(tmp_path / "model", tmp_path / "state")
            parts = trainer()
            parts.load(tmp_path / "model", tmp_path / "state", version_0=folder)
        parts.update(*random_rows(seed=update, newest=update), version=update)
    assert rates == pytest.approx([1e-3 * factor(knobs, update, 4, 2 * update + 2) for update in range(4)])
    assert is_unchanged(parts, weights(whole))
