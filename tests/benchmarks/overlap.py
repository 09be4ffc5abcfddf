"""The stream (`run.overlap`) against iterations one after the other.

An engine that only waits replaces vLLM, as if rollouts ran on machines of their own. The turns' lengths are log-normal
and each episode has 2 to 5 of them, so that the longest of a data set's episodes takes about 8 x the median.

`measure` runs the real flow in new processes, which run this file with the median seconds of a turn and the flow's
overrides as arguments. With 0 seconds they use vLLM.
"""

import itertools
import json
import sys
from dataclasses import dataclass
from statistics import fmean, median

from storage import layout
from storage.logs import catalog
from storage.versions import datasets, manifests
from tests.benchmarks.fixtures import Lab
from tests.benchmarks.result import Row

GOAL_SYNCHRONOUS, GOAL_LARGER = 0.5, 1.1
ITERATIONS, PROBLEMS, SAMPLES = 16, 32, 4
STALENESS = 4
SIGMA = 1.2
"""Standard deviation of the logarithm of a turn's length: the longest of 128 episodes is about 8 x the median."""
MEAN_EPISODE = 7.2
"""Mean length of an episode, in medians of a turn: 3.5 turns of exp(SIGMA² / 2)."""


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run of the flow."""

    wall_s: float  # from the first evaluation to the last checkpoint
    rollout_s: float  # seconds of all episodes, divided by the number that may run at the same time
    training_s: float
    longest: float  # mean over the data sets: the longest episode / the median
    staleness: float  # mean over the tokens
    trained: list[float]  # mean length of the episodes of each data set / that of all episodes that began

    @property
    def larger(self) -> float:
        """The time in which a pipeline without any wait would be done."""
        return max(self.rollout_s, self.training_s)


def measure(lab: Lab) -> list[Row]:
    """Measure with the waiting engine at several sizes and bounds, and with vLLM on the same cores."""
    probe = _run(lab, "probe", 0.01, 0, PROBLEMS * SAMPLES, iterations=4)
    training = probe.training_s / 4
    rows = []
    for waves in (4, 2, 1):  # the episodes of a data set, divided by those that may run at the same time
        concurrency = PROBLEMS * SAMPLES // waves
        turn_s = training / (waves * MEAN_EPISODE)  # rollout and training then need the same time
        apart = _run(lab, f"apart-{waves}", turn_s, 0, concurrency)
        for staleness in (1, 2, STALENESS, 2 * STALENESS) if waves == 2 else (STALENESS,):
            stream = _run(lab, f"stream-{waves}-{staleness}", turn_s, staleness, concurrency)
            rows.append(_row(waves, staleness, apart, stream))
            if staleness == STALENESS:
                rows.append(_bias(waves, stream))
    return [*rows, _on_vllm(lab)]


def _bias(waves: int, stream: Run) -> Row:
    """Show that short episodes, which finish first, are favoured only in the first data sets."""
    shown = 4
    first = ", ".join(f"{share:.2f}" for share in stream.trained[:shown])
    return Row(
        benchmark=f"length of what is trained on / of what began, 1/{waves} of a data set, staleness {STALENESS}",
        measured=f"{fmean(stream.trained[shown:]):.2f}",
        detail=f"mean of data sets {shown} to {ITERATIONS - 1}; data sets 0 to {shown - 1}: {first}",
    )


def _row(waves: int, staleness: int, apart: Run, stream: Run) -> Row:
    of_apart, of_larger = stream.wall_s / apart.wall_s, stream.wall_s / stream.larger
    goal = waves > 1 and staleness == STALENESS
    return Row(
        benchmark=f"overlap, waiting engine for 1/{waves} of a data set, staleness {staleness}",
        measured=f"{of_apart:.2f} of synchronous, {of_larger:.2f} of the larger stage",
        goal=f"{GOAL_SYNCHRONOUS} and {GOAL_LARGER} or less" if goal else "",
        met=of_apart <= GOAL_SYNCHRONOUS and of_larger <= GOAL_LARGER if goal else None,
        detail=f"{ITERATIONS} iterations: stream {stream.wall_s:.1f} s, synchronous {apart.wall_s:.1f} s; pure rollout "
        f"{stream.rollout_s:.1f} s, pure training {stream.training_s:.1f} s; longest episode {stream.longest:.1f} x "
        f"the median; mean staleness {stream.staleness:.2f}",
    )


def _on_vllm(lab: Lab) -> Row:
    apart = _run(lab, "apart-vllm", 0.0, 0, 512)
    stream = _run(lab, "stream-vllm", 0.0, STALENESS, 512)
    return Row(
        benchmark=f"overlap, vLLM on the same cores, staleness {STALENESS}",
        measured=f"{stream.wall_s / apart.wall_s:.2f} of synchronous",
        detail=f"{ITERATIONS} iterations: stream {stream.wall_s:.1f} s, synchronous {apart.wall_s:.1f} s",
    )


def _run(lab: Lab, name: str, turn_s: float, staleness: int, concurrency: int, iterations: int = ITERATIONS) -> Run:
    overrides = [f"run.name={name}", f"run.iterations={iterations}", f"evaluation.every={iterations}"]
    overrides += ["policy.warm_start=null", f"policy.path={lab.store.uri(lab.policy.version)}"]
    overrides += [f"run.overlap={str(staleness > 0).lower()}", f"rollout.max_head_offpolicyness={staleness}"]
    overrides += [f"rollout.problems_per_iteration={PROBLEMS}", f"rollout.group_size={SAMPLES}"]
    overrides += [f"rollout.concurrency={concurrency}", "ppo.threads=1"]
    if turn_s:
        overrides += ["agent={type: 'tests.support.waiting_engine:TwoToFiveTurns'}", "sampling.max_new_tokens=100"]
        overrides += ["inference.max_model_len=512"]
    lab.run_module("overlap", str(turn_s), *lab.overrides, *overrides)
    entries, folder = catalog.read_all(lab.store), f"runs/{name}/evaluations/000000/"
    first = next(entry.version for entry in entries if entry.kind == "scores" and entry.version.startswith(folder))
    last = layout.checkpoint(name, iterations)
    begin, end = (manifests.read(lab.store, version).created_at for version in (first, last))
    updates = [manifests.read(lab.store, layout.checkpoint(name, i + 1)).metrics for i in range(iterations)]
    lengths = [_lengths(lab, name, i) for i in range(iterations)]
    return Run(
        wall_s=(end - begin).total_seconds(),
        rollout_s=sum(map(sum, lengths)) / concurrency,
        training_s=sum(update["seconds/prepare"] + update["seconds/update"] for update in updates),
        longest=fmean(max(of_one) / median(of_one) for of_one in lengths),
        staleness=fmean(update["staleness/mean"] for update in updates),
        trained=[fmean(of_one) / fmean(itertools.chain.from_iterable(lengths)) for of_one in lengths],
    )


def _lengths(lab: Lab, name: str, iteration: int) -> list[float]:
    """Return the seconds of each episode of a data set."""
    rows = datasets.rows(lab.store, layout.trajectories(name, iteration), lab.scratch / "cache", ["latency_s"])
    return [row["latency_s"] for row in rows]


def main(turn_s: float, overrides: list[str]) -> None:
    from contextlib import nullcontext
    from unittest.mock import patch

    from flows.math_mt_ppo import math_mt_ppo
    from tests.support.waiting_engine import WaitingEngine, log_normal, opens

    engine = WaitingEngine(log_normal(turn_s, SIGMA)) if turn_s else None
    with patch("flows.math_mt_ppo.open_engine", opens(engine)) if engine else nullcontext():
        print(json.dumps(math_mt_ppo("demo", overrides)))


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
