"""Where one process that plays is the limit, and what more of them gain (`cluster.workers_per_node`).

Servers that only wait answer over HTTP as vLLM does, so that the processes have all their work and nobody else has any.
The processor time of an episode does not depend on what else runs: its inverse is what a process can play in a second.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from unittest.mock import patch

import psutil

from configs import Config, load
from storage.versions.drafts import Draft
from tests.benchmarks.fixtures import Lab
from tests.benchmarks.result import Row

if TYPE_CHECKING:
    from storage.version_names import ProblemsVersion
    from tasks.rollout.play import Workers

COUNTS = [count for count in (1, 2, 4) if count <= max(2, os.cpu_count() or 1)]
SERVERS, CONCURRENCY, GROUP = 4, 512, 16
TURNS = "agent={type: math-multi-turn, args: {num_turns: 2, stop_on_success: false}}"


@dataclass(frozen=True, slots=True)
class _Measured:
    rate: float
    """Episodes per second."""
    flow: float
    """Processor seconds of the flow's process for an episode."""
    players: list[float]
    """The same of each process that plays, for its part of the episodes; empty if the flow's process plays."""

    @property
    def busiest(self) -> float:
        """Processor seconds of the busiest process for an episode of all: nobody is faster than 1 / this."""
        return max(self.flow, *self.players, 0.0)


def measure(lab: Lab) -> list[Row]:
    """Play the same episodes with each number of processes: short answers, and answers of usual length."""
    rows = []
    for tokens, groups in ((12, 96), (500, 32)):
        found = {count: _measure(lab, count, tokens, groups) for count in COUNTS}
        alone, most = found[1], max(COUNTS)
        limits = ", ".join(
            f"{count}: {each.rate:.0f}/s here, at most {1 / each.busiest:.0f}/s" for count, each in found.items()
        )
        what = f"two turns, the processor time of an episode in one process: {1e3 * alone.flow:.1f} ms; "
        gain = f"{alone.busiest / found[most].busiest:.1f}"
        rows.append(
            Row(f"answers of {tokens} tokens: most episodes/s with {most} processes / 1", gain, detail=what + limits)
        )
    return rows


def _measure(lab: Lab, count: int, tokens: int, groups: int) -> _Measured:
    from prefect.logging import disable_run_logger

    from flows.run.workspace import Workspace
    from flows.stages.problems import import_problems
    from tests.support.waiting_server import waiting_servers

    folder = lab.scratch / f"servers-{tokens}-{count}"
    folder.mkdir()
    with waiting_servers(folder, SERVERS, 0.5, tokens) as urls:
        sizes = [
            f"cluster.workers_per_node={count}",
            f"rollout={{concurrency: {CONCURRENCY // count}, group_size: {GROUP}}}",
        ]
        lengths = [f"sampling.max_new_tokens={tokens}", "inference.max_model_len=2048"]
        config = load("demo", [*lab.settings, f"inference.urls={urls}", *sizes, *lengths, TURNS, "score.workers=1"])
        with disable_run_logger():
            problem_set, _ = import_problems.fn(Workspace(config))
        with _workers(lab, config) as (workers, players):
            _play(lab, config, problem_set, workers, "warm-up", 2 * SERVERS)
            return _timed(lab, config, problem_set, workers, players, groups)


@contextmanager
def _workers(lab: Lab, config: Config) -> Iterator[tuple["Workers", list[psutil.Process]]]:
    """Open the workers, and let them serve the policy; yield the processes that play besides this one, too."""
    from tasks.cluster.connection import connected
    from tasks.rollout.workers import LocalWorker
    from tasks.score.verifier import Verifier
    from tests.support.waiting_node import UnprovenNode
    from tests.support.waiting_server import UnprovenEngine

    policy, count = lab.policy, config.cluster.workers_per_node
    if count == 1:
        with Verifier(1) as verifier, UnprovenEngine(config.inference, config.rollout, lab.scratch) as engine:
            local = LocalWorker(engine, verifier, lambda _: policy)
            local.serve(policy.version)
            yield local, []
        return
    with connected(config):
        from tasks.cluster.workers import WorkerStarter

        with (
            patch("tasks.cluster.workers.NodeWorker", UnprovenNode),
            WorkerStarter(config, lambda _: None, playing=True) as nodes,
        ):
            nodes.scheduler.serve(policy.version)
            while sum(worker.policy == policy.version for worker in list(nodes.scheduler._workers)) < count:
                time.sleep(0.1)
            started = psutil.Process().children(recursive=True)
            yield nodes.scheduler, [each for each in started if each.cmdline()[0].startswith("ray::UnprovenNode")]


def _timed(
    lab: Lab,
    config: Config,
    problem_set: "ProblemsVersion",
    workers: "Workers",
    players: list[psutil.Process],
    groups: int,
) -> _Measured:
    processes = [psutil.Process(), *players]
    before = [_processor_s(process) for process in processes]
    start = time.perf_counter()
    episodes = _play(lab, config, problem_set, workers, "timed", groups)
    seconds = time.perf_counter() - start
    own, *others = [(_processor_s(process) - used) / episodes for process, used in zip(processes, before, strict=True)]
    return _Measured(episodes / seconds, own, others)


def _processor_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _play(lab: Lab, config: Config, problem_set: "ProblemsVersion", workers: "Workers", name: str, groups: int) -> int:
    from tasks.inference.api import GenerationConfig
    from tasks.problems import load_problems
    from tasks.rollout.plan import RolloutPlan, draw
    from tasks.rollout.play import play

    name = f"collectors-{name}-{config.cluster.workers_per_node}-{config.sampling.max_new_tokens}/000000"
    gconfig = GenerationConfig(max_new_tokens=config.sampling.max_new_tokens)
    problems = load_problems(config.problems.trained[0].source, config.problems.max_bad_share).problems
    plan = RolloutPlan(name, config, 0, lab.policy.version, problem_set, gconfig, GROUP)
    with Draft(lab.store, f"runs/{name}", "trajectories") as draft:
        metrics = play(plan, draw(problems, groups, 0, 1), workers, draft, lambda _: None)
    episodes: int = metrics["episodes"]
    assert episodes == groups * GROUP
    return episodes
