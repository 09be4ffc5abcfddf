from pathlib import Path
from pkgutil import resolve_name
from statistics import median

import pytest

from tests.benchmarks.fixtures import Lab
from tests.benchmarks.guard import LINES, MARGIN, ratios
from tests.benchmarks.iteration import PARTS, Clock


def test_parts_of_an_iteration_add_up() -> None:
    """A part's seconds do not count for the part around it, and all of them make the lap; every part is found."""
    moments = iter([0.0, 1.0, 3.0, 7.0, 15.0, 31.0])
    clock = Clock(lambda: next(moments))
    with clock.part("outer"), clock.part("inner"):
        pass
    assert clock.lap() == {"rest": 1.0 + 16.0, "outer": 2.0 + 8.0, "inner": 4.0}
    assert all(callable(resolve_name(target)) for target in PARTS.values())


@pytest.mark.slow
@pytest.mark.long
def test_rollouts_and_iterations_are_as_fast_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts take as little beyond bare requests, and iterations as little beyond their stages, as the lines say."""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    with Lab(tmp_path) as lab:
        for ratio in ratios(lab):
            assert median(ratio.processor) >= (1 - MARGIN) * LINES[ratio.name], ratio
