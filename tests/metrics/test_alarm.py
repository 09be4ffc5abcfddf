"""The alarm of a return that rises while success falls."""

import numpy as np
import pytest

from tasks.metrics.rows import Row
from tasks.metrics.show import paid_for_something_else


def rows(returns: list[float], successes: list[float]) -> list[Row]:
    return [{"return/mean": paid, "success/any_turn": right} for paid, right in zip(returns, successes, strict=True)]


@pytest.mark.parametrize("noise", [0.0, 0.005])
def test_a_policy_that_is_paid_for_being_wrong_first_raises_it(noise: float) -> None:
    """As seen in 15 updates of the demo with partial credit: return 1.057 to 1.179, success 0.79 to 0.375."""
    draw = np.random.default_rng(0)
    paid = np.linspace(1.057, 1.179, 15) + noise * draw.standard_normal(15)
    right = np.linspace(0.79, 0.375, 15) + noise * draw.standard_normal(15)
    alarm = paid_for_something_else(rows(paid.tolist(), right.tolist()))
    assert "while success falls" in alarm


def test_learning_noise_and_short_runs_raise_none() -> None:
    """Neither both rising, nor both falling, nor a thousand windows of pure noise of which one in 100 may."""
    up, down = np.linspace(0, 1, 12).tolist(), np.linspace(1, 0, 12).tolist()
    assert not paid_for_something_else(rows(up, up)) + paid_for_something_else(rows(down, down))
    assert not paid_for_something_else(rows(up[:7], down[:7])) + paid_for_something_else([{"return/mean": 1.0}] * 20)
    draw = np.random.default_rng(0)
    noise = (paid_for_something_else(rows(*draw.standard_normal((2, 12)).tolist())) for _ in range(1000))
    assert sum(map(bool, noise)) <= 1
