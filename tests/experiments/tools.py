"""Test if a policy learns from the verdicts when to call a tool: the demo of tools, and the same with coin flips.

Two more arms compare the default baseline with the others.

python -m tests.experiments.tools                     four arms, three seeds, 20 updates each: 20 to 60 minutes
python -m tests.experiments.tools --seeds 1           one run of each

Writes tools.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.experiments.control import coin_flips
from tests.experiments.runs import Arm, Experiment, Result, markdown

_MEASURES = {"first_turn": "right", "called": "with a call", "calls_failed": "failed calls"}


@dataclass(frozen=True, slots=True)
class ToolExperiment(Experiment):
    """Arms whose table has the calls, too."""

    def report(self, results: Sequence[Result]) -> str:
        """Write a Markdown table of what the held-out problems show before and after, for each arm and seed."""
        titles = [f"{title}, {when}" for title in _MEASURES.values() for when in ("before", "after")]
        rows = [["arm", "seed", *titles], ["---"] * (2 + len(titles))]
        for result in results:
            before, *_, after = result.numbers["evaluations"]
            cells = [_cell(numbers[name]) for name in _MEASURES for numbers in (before, after)]
            rows.append([result.arm, str(result.seed), *cells])
        return f"Held-out problems, greedy, with 95 % intervals.\n\n{markdown(rows)}"


def _cell(share: dict[str, Any] | None) -> str:
    return f"{share['value']:.3f} [{share['low']:.3f}, {share['high']:.3f}]" if share else ""


ARMS = [
    Arm("verdicts"),
    Arm("coin flips", around=coin_flips),
    Arm("verdicts, baseline turn", ["algorithm.advantage.baseline=turn"]),
    Arm("verdicts, baseline episode", ["algorithm.advantage.baseline=episode"]),
]

if __name__ == "__main__":
    experiment = ToolExperiment("tools", ARMS, 20, config="demo-tools")
    experiment.main((__doc__ or "").splitlines()[0])
