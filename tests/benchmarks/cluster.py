"""Simulated nodes: episodes per second of 1 to 16."""

import heapq
import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from unittest.mock import patch

from configs import Config
from configs.agent import Agent
from storage.records import Problem
from storage.versions.drafts import Draft
from tests.benchmarks.fixtures import Lab
from tests.benchmarks.result import Row

if TYPE_CHECKING:
    from storage.version_names import ProblemsVersion
    from tasks.rollout.plan import RolloutPlan

WORKERS = (1, 2, 4, 8, 16)
TURN_S = 2.0
GROUPS, AT_ONCE, GROUP = 12, 2, 16
"""Groups that each worker plays, those at the same time, and the episodes of a group."""


def measure(lab: Lab) -> Iterator[Row]:
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
    yield Row("workers: episodes/s in proportion", f"{worst:.2f}", detail)


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
