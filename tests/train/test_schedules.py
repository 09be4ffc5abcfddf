"""Learning rates: warm-up over steps, decay over the updates of the run, for policy and critic."""

from pathlib import Path
from typing import Any, Literal

import pytest

from configs import load
from configs.train import Optimizer
from tasks.train.optimizer import factor
from tests.support.train_helpers import GAE, make_trainer, random_rows, save_tiny

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


def test_policy_and_critic_have_rates_of_their_own(tmp_path: Path) -> None:
    """Both follow the schedule, by the updates of the run and its steps so far."""
    knobs, run = Optimizer(lr=1e-3, schedule="cosine", warmup_steps=3), load("smoke", ["run.iterations=4"]).run
    options: dict[str, Any] = {"critic": {"model": "own", "lr": 2e-3}, "minibatches": 2, **GAE}
    trainer = make_trainer(save_tiny(tmp_path), knobs, run=run, **options)
    assert (critic := trainer.state.critic)
    assert critic.adamw
    for update in range(4):
        rate = trainer.update(*random_rows(newest=update), version=update)["lr"]
        assert rate == pytest.approx(1e-3 * factor(knobs, update, 4, 2 * update + 2))
        assert critic.adamw.param_groups[0]["lr"] == pytest.approx(2 * rate)
