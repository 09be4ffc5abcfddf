"""The time that Prefect, storage and everything else add to the three stages of an iteration.

`measure` runs the real flow in a new process, which runs this file with the flow's overrides as arguments. That
process times some calls while the flow runs, and prints when each began and how long it took.
"""

import json
import sys
import time
from collections.abc import Sequence
from functools import wraps
from statistics import median
from typing import TYPE_CHECKING, Any

from storage import layout
from storage.versions import manifests
from tests.benchmarks.fixtures import Lab
from tests.benchmarks.result import Row, spread

if TYPE_CHECKING:
    from tasks.evaluate.learning_curve import Iteration

GOAL = 0.05
RUN = "overhead"
SKIPPED = 2  # iterations in which caches fill
ITERATIONS = 12
STAGES = ("play", "swap", "score", "prepare", "update")

Span = tuple[str, float, float]
"""Name of the call, its start (seconds since the epoch) and its duration (seconds)."""


def measure(lab: Lab) -> list[Row]:
    """Time iterations of the demo from one checkpoint's manifest to the next; subtract the time of the stages."""
    from tasks.evaluate.learning_curve import read_learning_curve
    from tasks.score.scoring import scorer_fingerprint

    overrides = [f"run.name={RUN}", f"run.iterations={ITERATIONS}", f"evaluation.every={ITERATIONS}"]
    overrides += ["policy.warm_start=null", f"policy.path={lab.store.uri(lab.policy.version)}"]
    spans = lab.run_module("overhead", *lab.overrides, *overrides)
    config = lab.config(*overrides)
    scorer = scorer_fingerprint(config.score)
    history = read_learning_curve(lab.store, config, scorer, held_out=layout.problems("0"), cache=lab.scratch)
    return [_row([_seconds(lab, iteration, spans) for iteration in history.iterations[SKIPPED:]])]


def _row(iterations: list[dict[str, float]]) -> Row:
    shares = [seconds["overhead"] / seconds["iteration"] for seconds in iterations]
    typical = {name: f"{median(seconds[name] for seconds in iterations):.3f}" for name in iterations[0]}
    stages = " + ".join(f"{name} {typical[name]}" for name in STAGES)
    rest = ", ".join(f"{name} {typical[name]}" for name in ("checkpoint", "Prefect", "other"))
    detail = f"iteration {typical['iteration']} = {stages} + overhead {typical['overhead']} ({rest})"
    return Row(
        benchmark="overhead / iteration",
        measured=f"{typical['overhead']} s, {spread(shares, '{:.1%}'.format)}",
        goal=f"{GOAL:.0%} or less",
        met=median(shares) <= GOAL,
        detail=f"seconds, medians of {len(iterations)}: {detail}",
    )


def _seconds(lab: Lab, iteration: "Iteration", spans: Sequence[Span]) -> dict[str, float]:
    """Split an iteration's seconds by activity. Swapping and proving weights counts as part of the rollout stage."""
    versions = [layout.checkpoint(RUN, number) for number in (iteration.number, iteration.number + 1)]
    begin, end = (manifests.read(lab.store, version).created_at.timestamp() for version in versions)
    timed = {
        what: sum(seconds for name, began, seconds in spans if name == what and begin < began <= end)
        for what in ("swap", "checkpoint", "Prefect")
    }
    stages = {
        "play": iteration.rollout["seconds"],
        "swap": timed["swap"],
        "score": iteration.score["seconds"],
        "prepare": iteration.train["seconds/prepare"],
        "update": iteration.train["seconds/update"],
    }
    overhead = end - begin - sum(stages.values())
    other = overhead - timed["checkpoint"] - timed["Prefect"]
    return stages | timed | {"iteration": end - begin, "overhead": overhead, "other": other}


def main(overrides: list[str]) -> None:
    """Run the flow; print the spans as JSON in the last line of output."""
    from flows.math_mt_ppo import math_mt_ppo
    from storage.versions import checkpoints
    from tasks.inference.engine import Engine
    from tasks.rollout.task import rollout
    from tasks.score.task import score
    from tasks.train.task import train
    from tasks.train.trainer import Trainer

    spans: list[Span] = []
    left = time.time()  # when the code of the last stage ended

    def time_call(owner: Any, name: str, what: str) -> None:
        function = getattr(owner, name)

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.time()
            result = function(*args, **kwargs)
            spans.append((what, began, time.time() - began))
            return result

        setattr(owner, name, timed)

    def time_between(task: Any) -> None:
        function = task.fn

        @wraps(function)
        def stage(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            spans.append(("Prefect", left, time.time() - left))
            result = function(*args, **kwargs)
            left = time.time()
            return result

        task.fn = stage

    time_call(Engine, "serve", "swap")
    for owner, name in ((Trainer, "save"), (Trainer, "canary"), (checkpoints, "commit")):
        time_call(owner, name, "checkpoint")
    for task in (rollout, score, train):
        time_between(task)
    math_mt_ppo("demo", overrides)
    print(json.dumps(spans))


if __name__ == "__main__":
    main(sys.argv[1:])
