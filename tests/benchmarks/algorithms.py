"""Every algorithm's update against PPO's with the same passes, on the same data of the demo, taken in turns.

PPO makes a pass for proximal logprobs; where an algorithm has a reference policy or a teacher, PPO has a KL penalty.
"""

import time
from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING, Any

from configs.algorithms import NAMES, read_algorithm
from tests.benchmarks.fixtures import Lab
from tests.benchmarks.result import Row, spread
from tests.benchmarks.training import play

if TYPE_CHECKING:
    from tasks.train.trainer import Trainer

WARM_UP, ROUNDS = 2, 8
NEEDED: dict[str, dict[str, Any]] = {"echo": {"observations": "all"}}
PENALTY = {"kl": {"kl_ctl": 0.1, "place": "loss"}}


def measure(lab: Lab) -> Iterator[Row]:
    """Measure one row for each algorithm."""
    config = lab.config()
    trajectories, scores = play(lab, config)
    plain, penalised = (_trainer(lab, {"type": "ppo", **options}) for options in ({}, PENALTY))
    for name in NAMES:
        knobs = {"type": name, **NEEDED.get(name, {})}
        own = _trainer(lab, knobs)
        with_others = read_algorithm(knobs).keeps_reference or name == "opd"
        ratios, seconds = list[float](), list[float]()
        for _ in range(WARM_UP + ROUNDS):
            took = []
            for trainer in (penalised if with_others else plain, own):
                start = time.perf_counter()
                trainer.update(trajectories, scores, version=0)
                took.append(time.perf_counter() - start)
            ratios.append(took[1] / took[0])
            seconds.append(took[1])
        beside = "ppo with a KL penalty" if with_others else "ppo"
        detail = f"{median(seconds[WARM_UP:]):.2f} s an update, samples built; {ROUNDS} pairs"
        yield Row(f"update of {name} / of {beside}", spread(ratios[WARM_UP:], "{:.2f}".format), detail)


def _trainer(lab: Lab, knobs: dict[str, Any]) -> "Trainer":
    from tasks.train.train_state import load_train_state
    from tasks.train.trainer import Trainer

    config = lab.config().model_copy(update={"algorithm": read_algorithm(knobs)})
    teacher = (lab.policy.model, None) if knobs["type"] == "opd" else None
    return Trainer(load_train_state(config, lab.policy.model, teacher=teacher))
