"""FLOPs, with which `tests.gpu` computes how much of a GPU an update uses."""

from tests.gpu.speed import TINY as SHAPE
from tests.gpu.speed import make_random_trainer, timed_updates, training_flops


def test_flops_by_hand() -> None:
    """A token costs 6 FLOPs for each parameter of a matrix; attention 12 * layers * hidden * T² / 2."""
    parameters = 2 * (2 * 32 * 8 * (4 + 2) + 3 * 32 * 64) + 32 * 50
    assert SHAPE.matrix_parameters == parameters == 20032
    assert training_flops(SHAPE, [10]) == 6 * 20032 * 10 + 12 * 2 * 32 * 10 * 10 / 2
    assert training_flops(SHAPE, [10, 10]) == 2 * training_flops(SHAPE, [10])
    runs = timed_updates(SHAPE, make_random_trainer(SHAPE, "cpu"))  # the code that times a GPU runs on the CPU, too
    assert len(runs) == 2
    assert all(run.tokens > 0 and run.flops > 0 and 0 < run.seconds < run.whole for run in runs)
