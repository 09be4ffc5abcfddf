"""Simulated nodes: episodes per second of 1 to 16, the score stage on two, and what Ray costs on one machine."""

import heapq
import os
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING
from unittest.mock import patch

from configs import Config
from configs.agent import Agent
from storage import layout
from storage.objects.store import Store
from storage.records import TRAJECTORY_SCHEMA, Problem
from storage.version_names import TrajectoriesVersion
from storage.versions import manifests
from storage.versions.datasets import ShardWriter
from storage.versions.drafts import Draft, Provenance
from tests.benchmarks.fixtures import Lab
from tests.benchmarks.result import Row, spread

if TYPE_CHECKING:
    from storage.version_names import ProblemsVersion
    from tasks.rollout.plan import RolloutPlan

WORKERS = (1, 2, 4, 8, 16)
TURN_S = 2.0
GROUPS, AT_ONCE, GROUP = 12, 2, 16
"""Groups that each worker plays, those at the same time, and the episodes of a group."""
PAIRS, ITERATIONS, FIRST = 3, 16, 2
"""Pairs of runs with and without Ray; iterations of a run, and the number of those at its start that do not count."""
SHARDS, PROBLEMS = 16, 192
"""Shards of the data set that is graded, and the problems whose answers it has."""
LATEX = (
    r"\frac{11}{11}",
    r"11\sqrt{11}",
    r"\left(11, \frac{1}{11}\right)",
    "x^2 + 11x - 11",
    r"\left[11, \infty\right)",
)
WORDS = ("so", "then", "we", "add", "both", "sides", "and", "divide", "by", "two", "which", "leaves", "half")


def measure(lab: Lab) -> Iterator[Row]:
    yield _scaling(lab)
    yield _scoring(lab)
    yield _overhead(lab)


def _scoring(lab: Lab) -> Row:
    """Grade the same data set on one node and on two, each with one process of the verifier."""
    from tests.support.simulated_cluster import simulated_cluster

    graded = _answers(lab)
    seconds = []
    for nodes in (1, 2):
        with simulated_cluster(nodes) as address:
            seconds.append(_score_s(lab, address, nodes, graded))
    one, two = seconds
    what = f"{PROBLEMS * GROUP} LaTeX answers in {SHARDS} shards: {one:.1f} s and {two:.1f} s"
    return Row("score stage: two nodes / one", f"{two / one:.2f}", what)


def _answers(lab: Lab) -> TrajectoriesVersion:
    """Commit a data set of different answers, each in an episode of its own."""
    from tests.support.train_helpers import make_trajectory

    rng, version = random.Random(1), layout.trajectories("graded", 0)
    pairs = [pair for _ in range(PROBLEMS) for pair in _answers_to_one(rng)]
    with Draft(lab.store, version, "trajectories") as draft:
        with ShardWriter(draft, TRAJECTORY_SCHEMA, -(-len(pairs) // SHARDS)) as writer:
            for number, (answer, solutions) in enumerate(pairs):
                row = make_trajectory(f"graded/{number}", [[1]])
                turn = replace(row.turns[0], text=answer)
                writer.write(replace(row, turns=[turn], solutions=solutions))
        draft.commit(Provenance(config={}), [])
    return version


def _answers_to_one(rng: random.Random) -> list[tuple[str, list[str]]]:
    """Make a group's answers to one problem, each behind a working of its own, with the solutions."""
    shape, rate = rng.choice(LATEX), rng.random()
    gold, *wrong = (re.sub("1", lambda _: str(rng.randint(1, 9)), shape) for _ in range(5))
    pairs = []
    for _ in range(GROUP):
        value = gold if rng.random() < rate else rng.choice(wrong)
        words = rng.choices([*WORDS, f"$x_{{1}} = {rng.randint(2, 99)} + y$"], k=150)
        pairs.append((f"{' '.join(words)}, case {rng.getrandbits(48)}: \\boxed{{{value}}}", [gold]))
    return pairs


def _score_s(lab: Lab, address: str, nodes: int, graded: TrajectoriesVersion) -> float:
    """Return the seconds of the score stage on as many nodes, which only grade."""
    from tasks.cluster.connection import connected

    config = lab.config("inference.urls=[]", f"cluster.address={address}", "score.workers=1")
    with connected(config):
        from tasks.cluster.workers import WorkerStarter

        with WorkerStarter(config, lambda _: None, playing=False) as workers:
            while sum(worker.ready for worker in list(workers.scheduler._workers)) < nodes:
                time.sleep(0.1)
            with Draft(lab.store, layout.scores("graded", 0, f"n{nodes}"), "scores") as draft:
                start = time.perf_counter()
                workers.scheduler.score(graded, draft, config)
                return time.perf_counter() - start


def _overhead(lab: Lab) -> Row:
    """Compare the iterations of the demo with and without a cluster of one node."""
    from tests.support.simulated_cluster import simulated_cluster

    ratios, seconds = [], []
    with simulated_cluster(1) as address:
        for pair in range(PAIRS):
            alone = _iteration_s(lab, f"alone-{pair}", "cluster.address=null")
            seconds.append((alone, _iteration_s(lab, f"ray-{pair}", f"cluster.address={address}")))
            ratios.append(seconds[-1][1] / alone)
    detail = "median seconds of an iteration, alone and on Ray: " + ", ".join(f"{a:.2f} {b:.2f}" for a, b in seconds)
    return Row("the demo on a cluster of one node / without Ray", spread(ratios, "{:.3f}".format), detail)


def _iteration_s(lab: Lab, name: str, cluster: str) -> float:
    """Run the demo in a process of its own; return the median seconds between two policies."""
    store = Store(f"{lab.scratch}/{name}")
    overrides = [f"storage.root={store.root}", f"storage.cache={store.root}/cache", f"run.iterations={ITERATIONS}"]
    overrides += [f"evaluation.every={ITERATIONS}", f"run.name={name}", cluster]
    overrides += [f"policy.path={lab.store.uri(lab.policy.version)}"]
    lab.run_module("overlap", "0", *lab.settings, *overrides)
    made = [
        manifests.read(store, layout.checkpoint(name, number)).created_at for number in range(FIRST, ITERATIONS + 1)
    ]
    return median((later - earlier).total_seconds() for earlier, later in pairwise(made))


def _scaling(lab: Lab) -> Row:
    """Play as many groups for each worker with few and with many workers; compare the time with the least possible."""
    from tests.support.simulated_cluster import simulated_cluster
    from tests.support.waiting_node import SECONDS

    # Workers inherit it from their node. It is not patched, since that would also take back Ray's token at the end.
    os.environ[SECONDS] = str(TURN_S)
    with simulated_cluster(max(WORKERS)) as address:
        shares = {count: _share_of_ideal(lab, address, count) for count in WORKERS}
    worst = min(shares.values()) / shares[1]
    shown = ", ".join(f"{count}: {share:.2f}" for count, share in shares.items())
    detail = (
        f"least time for the waits / measured time, {shown}; single-turn episodes of {TURN_S:g} s (median), groups of "
        f"{GROUP}, {GROUPS} for each worker, two at a time"
    )
    return Row("workers: episodes/s in proportion", f"{worst:.2f}", detail)


def _share_of_ideal(lab: Lab, address: str, count: int) -> float:
    """Return the least time that the groups of `count` workers need, as a share of the measured one."""
    from prefect.logging import disable_run_logger

    from flows.run.workspace import Workspace
    from flows.stages.problems import import_problems
    from tasks.cluster.connection import connected

    limits = f"cluster={{address: '{address}', rollout_workers: {count}}}"
    config = lab.config("inference.urls=[]", limits, f"rollout.concurrency={AT_ONCE * GROUP}", "score.workers=1")
    config = config.model_copy(update={"agent": Agent(type="math-single-step")})
    with disable_run_logger():
        problem_set, _ = import_problems.fn(Workspace(config))
    with connected(config):
        return _play(lab, config, problem_set, count)


def _play(lab: Lab, config: Config, problem_set: "ProblemsVersion", count: int) -> float:
    from tasks.cluster.workers import WorkerStarter
    from tasks.inference.api import GenerationConfig
    from tasks.problems import load_problems
    from tasks.rollout.plan import RolloutPlan, draw
    from tasks.rollout.play import play
    from tests.support.waiting_node import WaitingNode

    gconfig, policy = GenerationConfig(max_new_tokens=12), lab.policy.version
    problems = load_problems(config.problems.trained[0].source, config.problems.max_bad_share).problems
    drawn = draw(problems, GROUPS * count, 0, 1)
    with (
        patch("tasks.cluster.workers.NodeWorker", WaitingNode),
        WorkerStarter(config, lambda _: None, playing=True) as workers,
    ):
        workers.scheduler.serve(policy)
        while sum(worker.policy == policy for worker in list(workers.scheduler._workers)) < count:
            time.sleep(0.1)
        # Only the second rollout counts: in the first one workers import what they need.
        for iteration, played in enumerate([drawn[: AT_ONCE * count], drawn]):
            name = f"cluster-{count}/{iteration:06}"
            plan = RolloutPlan(name, config, iteration, policy, problem_set, gconfig, GROUP)
            with Draft(lab.store, f"runs/{name}", "trajectories") as draft:
                start = time.perf_counter()
                metrics = play(plan, played, workers.scheduler, draft, lambda _: None)
                seconds = time.perf_counter() - start
    assert metrics["episodes"] == len(drawn) * GROUP
    ideal = _ideal_s(plan, drawn, AT_ONCE * count)
    rate = metrics["episodes"] / seconds
    print(f"  {count} workers: {rate:.1f} episodes/s, {seconds:.1f} s, at least {ideal:.1f} s", flush=True)
    return ideal / seconds


def _ideal_s(plan: "RolloutPlan", problems: Sequence[Problem], slots: int) -> float:
    """Return the seconds until the last group ends if only the engine takes time; more groups have longer ones."""
    from tasks.inference.api import derive
    from tests.support.waiting_engine import log_normal
    from tests.support.waiting_node import SPREAD

    seconds, ends = log_normal(TURN_S, SPREAD), [0.0] * slots
    for problem in problems:
        seed = min(derive(episode.seed, 0) for episode in plan.group(problem).prompts)  # a request for all episodes
        heapq.heapreplace(ends, ends[0] + max(map(seconds, range(seed, seed + GROUP))))
    return max(ends)
