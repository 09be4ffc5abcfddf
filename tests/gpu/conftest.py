"""What only a GPU can show. Without one the tests rehearse on the CPU, with tiny shapes, and skip what needs CUDA."""

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
LIMIT_S = 180 if GPU else 1200
"""Longest time of a test."""
Measured = Callable[[Mapping[str, float]], None]
"""What prints the numbers of a test, and writes them into the file of `--junitxml`."""


def needs_cuda(*values: object) -> object:
    """Return the value of a parameter that is skipped without a GPU."""
    return pytest.param(*values, marks=pytest.mark.skipif(not GPU, reason="needs CUDA"))


def within(numbers: Mapping[str, float], limits: Mapping[str, float]) -> bool:
    """Return whether no number is NaN or above its limit."""
    return all(numbers[name] <= limit for name, limit in limits.items())


@pytest.fixture
def measured(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None], capsys: pytest.CaptureFixture[str]
) -> Iterator[Measured]:
    def show(numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            record_property(name, value)
        with capsys.disabled():
            print(f"\n  {request.node.name}: {', '.join(f'{name} {value:.4g}' for name, value in numbers.items())}")

    yield show
    if GPU:
        torch.cuda.empty_cache()
