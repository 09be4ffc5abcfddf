"""The two ratios that tell most, which must not fall far below the lines of this file.

`tests/benchmarks/test_guard.py` fails where a median is 15 % below its line. It looks at processor time, of all
processes, since that hardly depends on what else runs; a wait without work shows in the wall times only, which
`make bench ARGS=guard` prints beside it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from storage.objects.store import Store
from tests.benchmarks.fixtures import Lab
from tests.benchmarks.iteration import STAGES
from tests.benchmarks.result import Row, spread
from tests.benchmarks.rollout import pairs_of

LINES = {"bare requests / rollout stage": 0.69, "rollout, score and update / iteration": 0.85}
"""The measured ratios, by processor time; larger is better. Raise a line when a change has made its ratio larger."""
MARGIN = 0.15
PAIRS, ITERATIONS, WARM_UP = 10, 12, 2
RUN = "guard"


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio in pairs or iterations, by processor time and by wall time."""

    name: str  # of LINES
    processor: list[float]
    wall: list[float]


def measure(lab: Lab) -> Iterator[Row]:
    """Measure both ratios."""
    for ratio in ratios(lab):
        shown = [spread(values, "{:.2f}".format) for values in (ratio.processor, ratio.wall)]
        yield Row(ratio.name, shown[0], f"of processor time, line {LINES[ratio.name]}; of wall time {shown[1]}")


def ratios(lab: Lab) -> Iterator[Ratio]:
    """Yield the ratios, in the order of `LINES`."""
    rollout, iteration = LINES
    pairs, _ = pairs_of(lab, PAIRS)
    processor = [bare.processor_s / stage.processor_s for stage, bare in pairs]
    yield Ratio(rollout, processor, [bare.seconds / stage.seconds for stage, bare in pairs])
    yield Ratio(iteration, *_iterations(lab))


def _iterations(lab: Lab) -> tuple[list[float], list[float]]:
    """Run the demo with one turn; return each iteration's ratio by processor time and by wall time."""
    from tasks.metrics.log import read_rows
    from tasks.metrics.rows import TIMES, by_iteration

    overrides = ["agent.args={num_turns: 1}", f"run.iterations={ITERATIONS}", "evaluation.every=1000"]
    overrides += [f"run.name={RUN}", f"storage.root={lab.store.root}", f"storage.cache={lab.scratch}/cache"]
    laps = lab.run_module("iteration", "processor", "demo", *overrides)[WARM_UP:]
    processor = [sum(lap[stage] for stage in STAGES) / sum(lap.values()) for lap in laps]
    rows = list(by_iteration(read_rows(Store(lab.store.root), RUN)).values())[WARM_UP - 1 :]
    ended = [datetime.fromisoformat(row["at"]) for row in rows]
    seconds = [(after - before).total_seconds() for before, after in pairwise(ended)]
    wall = [sum(row[name] for name in TIMES) / whole for row, whole in zip(rows[1:], seconds, strict=True)]
    return processor, wall
