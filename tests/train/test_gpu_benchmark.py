"""The benchmark for GPUs: its formulas, and its code with a tiny model on the CPU."""

import pytest

from tests.benchmarks.gpu import SHAPES, Shape, measure_shape, mfu, peak_tflops, training_flops

TINY = Shape("tiny", 2, 32, 64, 4, 2, 50, tied=False, trajectories=8, longest=9, ppo={"threads": 1})


def test_parameters_are_those_of_the_models() -> None:
    """The matrices hold almost all parameters; Qwen2.5-1.5B has 1.54 billion and 7B 7.6, 0.5 of them embeddings."""
    small, large = (shape.matrix_parameters / 1e9 for shape in SHAPES)
    assert small == pytest.approx(1.54, abs=0.01)
    assert large == pytest.approx(7.62 - 0.545, abs=0.01)


def test_flops_by_hand() -> None:
    """A token costs 6 FLOPs for each parameter of a matrix; attention 12 * layers * hidden * T² / 2."""
    parameters = 2 * (2 * 32 * 8 * (4 + 2) + 3 * 32 * 64) + 32 * 50
    assert TINY.matrix_parameters == parameters == 20032
    assert training_flops(TINY, [10]) == 6 * 20032 * 10 + 12 * 2 * 32 * 10 * 10 / 2
    assert training_flops(TINY, [10, 10]) == 2 * training_flops(TINY, [10])


def test_mfu_is_a_share_of_the_peak() -> None:
    assert mfu(flops=4e14, seconds=2.0, tflops=500.0) == 0.4
    assert peak_tflops("NVIDIA H100 80GB HBM3") == 989.0
    assert peak_tflops("NVIDIA H100 PCIe") == 756.0
    assert peak_tflops("another device") is None


def test_it_runs_on_the_cpu() -> None:
    """The code that times a GPU runs with a tiny model on the CPU."""
    runs = measure_shape(TINY, "cpu")
    assert len(runs) == 3
    assert all(run.tokens > 0 and run.flops > 0 and 0 < run.seconds < run.whole for run in runs)
