"""The stream (`run.overlap`) against iterations one after the other.

An engine that only waits replaces vLLM, as if rollouts ran on machines of their own. The seconds of a turn are
log-normal and each episode has 2 to 5 turns, so that the longest of a data set's episodes takes about 10 x the median.
The trainer has one thread, which leaves a core to the flow's process with the stream's client.

`measure` runs the real flow in new processes, which run this file with the median seconds of a turn and the flow's
overrides as arguments.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from storage import layout
from storage.logs import catalog
from storage.objects.store import Store
from storage.versions import datasets, manifests
from tests.benchmarks.fixtures import Lab
from tests.benchmarks.result import Row

RUN = "overlap"
ITERATIONS, PROBLEMS, SAMPLES = 32, 32, 4
"""Nothing is trained on before the first data set is there, so short runs gain less."""
LAST = 4
"""Further iterations that are not counted: at the end of a run no more groups begin, and it waits for the last ones."""
STALENESS = 4
WAVES = 4
"""The episodes of a data set, divided by those that may run at the same time."""
TOKENS = 48
"""Tokens of a turn."""
SIGMA = 1.35
"""Standard deviation of the logarithm of a turn's seconds: the longest of 128 episodes is about 10 x the median."""
MEAN_EPISODE = 8.7
"""Mean length of an episode, in medians of a turn: 3.5 turns of exp(SIGMA² / 2)."""


@dataclass(frozen=True, slots=True)
class Run:
    """The counted iterations of a run."""

    wall_s: float  # from the first evaluation to the last checkpoint
    rollout_s: float  # seconds of all episodes, divided by the number that may run at the same time
    training_s: float  # from each data set to its checkpoint: score, train, commit; without a stream
    longest: float  # mean over the data sets: the longest episode / the median
    staleness: float  # mean over the tokens

    @property
    def larger(self) -> float:
        """The time in which a pipeline would be done whose stages never wait and never share a processor."""
        return max(self.rollout_s, self.training_s)


def measure(lab: Lab) -> list[Row]:
    """Measure where rollouts are shorter or longer than training."""
    probe = _run(lab, "probe", 0.01, 0, PROBLEMS * SAMPLES, iterations=4)
    training, concurrency = probe.training_s / 4, PROBLEMS * SAMPLES // WAVES
    rows = []
    for share, bounds in ((0.7, (STALENESS,)), (1.0, (1, STALENESS)), (1.5, (STALENESS,))):
        turn_s = share * training / (WAVES * MEAN_EPISODE)
        apart = _run(lab, f"apart-{share:g}", turn_s, 0, concurrency)
        for staleness in bounds:
            stream = _run(lab, f"stream-{share:g}-{staleness}", turn_s, staleness, concurrency)
            rows.append(_row(share, staleness, apart, stream))
    return rows


def _row(share: float, staleness: int, apart: Run, stream: Run) -> Row:
    of_apart, of_larger = stream.wall_s / apart.wall_s, stream.wall_s / apart.larger
    return Row(
        benchmark=f"overlap, rollouts {share:g} x training, staleness {staleness}",
        measured=f"{of_apart:.2f} of synchronous, {of_larger:.2f} of the larger stage",
        detail=f"{ITERATIONS} iterations: stream {stream.wall_s:.1f} s, synchronous {apart.wall_s:.1f} s; pure rollout "
        f"{apart.rollout_s:.1f} s, pure training {apart.training_s:.1f} s; longest episode {stream.longest:.1f} x "
        f"the median; mean staleness {stream.staleness:.2f}",
    )


def _run(lab: Lab, name: str, turn_s: float, staleness: int, concurrency: int, iterations: int = ITERATIONS) -> Run:
    """Run the flow in a store of its own, so that all runs have the same name, and so play the same episodes."""
    total, store = iterations + LAST, Store(f"{lab.scratch}/{name}")
    overrides = [f"run.name={RUN}", f"storage.root={store.root}", f"storage.cache={store.root}/cache"]
    overrides += [f"run.iterations={total}", f"evaluation.every={total}"]
    overrides += [f"policy.path={lab.store.uri(lab.policy.version)}"]
    overrides += [f"run.overlap={str(staleness > 0).lower()}", f"rollout.max_head_offpolicyness={staleness}"]
    overrides += [f"rollout.problems_per_iteration={PROBLEMS}", f"rollout.group_size={SAMPLES}"]
    overrides += [f"rollout.concurrency={concurrency}", "train.threads=1"]
    overrides += ["agent={type: 'tests.support.waiting_engine:TwoToFiveTurns'}", "inference.max_model_len=512"]
    overrides += ["sampling.max_new_tokens=100"]  # so much that each turn is a request of its own
    lab.run_module("overlap", str(turn_s), *lab.overrides, *overrides)
    entries, folder = catalog.read_all(store), f"runs/{RUN}/evaluations/000000/"
    first = next(entry.version for entry in entries if entry.kind == "scores" and entry.version.startswith(folder))
    last = layout.checkpoint(RUN, iterations)
    updates = [manifests.read(store, layout.checkpoint(RUN, i + 1)).metrics for i in range(iterations)]
    lengths = [_lengths(store, i) for i in range(iterations)]
    return Run(
        wall_s=_seconds(store, first, last),
        rollout_s=sum(map(sum, lengths)) / concurrency,
        training_s=sum(
            _seconds(store, layout.trajectories(RUN, i), layout.checkpoint(RUN, i + 1)) for i in range(iterations)
        ),
        longest=fmean(max(of_one) / median(of_one) for of_one in lengths),
        staleness=fmean(update["staleness/mean"] for update in updates),
    )


def _seconds(store: Store, first: str, last: str) -> float:
    """Return the time between the commits of two versions."""
    begin, end = (manifests.read(store, version).created_at for version in (first, last))
    return (end - begin).total_seconds()


def _lengths(store: Store, iteration: int) -> list[float]:
    """Return the seconds of each episode of a data set."""
    rows = datasets.rows(store, layout.trajectories(RUN, iteration), Path(store.root) / "cache", ["latency_s"])
    return [row["latency_s"] for row in rows]


def main(turn_s: float, overrides: list[str]) -> None:
    from unittest.mock import patch

    from flows.launch.temporary_server import temporary_server
    from flows.math_mt_ppo import math_mt_ppo
    from tests.support.waiting_engine import WaitingEngine, log_normal, opens

    engine = WaitingEngine(log_normal(turn_s, SIGMA), length=TOKENS)
    with temporary_server(), patch("flows.run.resources.open_engine", opens(engine)):
        print(json.dumps(math_mt_ppo("demo", overrides)))


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
