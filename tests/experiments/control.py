"""Test if the policy learns from the verdicts: run the demo with true verdicts and with coin flips.

python -m tests.experiments.control                 two arms, three seeds, 100 updates each: 25 minutes on 2 cores
python -m tests.experiments.control --iterations 2  a short trial

Everything else is equal, and evaluations always use true verdicts. Effects of an update that do not come from
verdicts occur in both arms, such as calming a policy after the large steps by which it was taught. Writes control.md.
"""

import copy
import importlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

from tasks.score.verdict import Verdict
from tasks.score.verifier import Verifier
from tests.experiments.runs import Arm, Experiment


class CoinFlips(Verifier):
    """A verifier without workers, whose verdicts are coin flips, independent of the answer, in rollout and in score."""

    def __init__(self, seed: int) -> None:
        self._flip = random.Random(seed)

    def grade(self, pairs: Sequence[tuple[str, Sequence[str]]]) -> list[Verdict]:
        return [Verdict("correct" if self._flip.random() < 0.5 else "wrong", solution=of[0]) for _, of in pairs]

    async def grade_async(self, answer: str, solutions: Sequence[str]) -> Verdict:
        return self.grade([(answer, solutions)])[0]


@contextmanager
def coin_flips() -> Iterator[None]:
    """Make the main flow play and score with coin flips inside of the block. Evaluations use true verdicts."""
    flow: Any = importlib.import_module("flows.math_mt_ppo")
    coins = cache(CoinFlips)  # by seed: runs with other seeds have other coins

    def flipping(stage: Any) -> Any:
        def start(workspace: Any, workers: Any, *rest: Any) -> Any:
            other = copy.copy(workers)
            other._verifier = coins(workspace.config.run.seed)
            return stage(workspace, other, *rest)

        return start

    with patch.object(flow, "Rollouts", flipping(flow.Rollouts)), patch.object(flow, "score", flipping(flow.score)):
        yield


ARMS = [Arm("verdicts"), Arm("coin flips", around=coin_flips)]

if __name__ == "__main__":
    Experiment("control", ARMS, 100).main((__doc__ or "").splitlines()[0])
