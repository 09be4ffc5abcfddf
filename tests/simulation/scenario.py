"""Plays a scenario: an iteration with the real scheduler, ledger, journal and commit, in virtual time."""

import asyncio
import contextlib
import gc
import resource
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import patch

from configs import load
from storage import layout
from storage.logs.leases import Lease
from storage.objects.store import Store
from storage.records import Problem
from storage.version_names import PolicyVersion
from storage.versions.drafts import Draft, JournaledDraft, Provenance
from storage.versions.manifests import Manifest
from tasks.inference.api import GenerationConfig
from tasks.rollout import outcomes
from tasks.rollout.plan import RolloutPlan
from tasks.rollout.play import SharedGroups, play
from tasks.rollout.remote import jobs, scheduler, worker
from tests.simulation.clock import VirtualLoop, World
from tests.simulation.cluster import Cluster, Scenario
from tests.simulation.store import SimulatedBackend, simulated_store

RUN = "r"
POLICY = layout.checkpoint(RUN, 0)
VERSION = layout.trajectories(RUN, 0)
NEVER_S = 1e6  # the lease gives no signs of life: it has no virtual time


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulation measured; times are virtual unless they are called real."""

    manifest: Manifest
    store: Store
    backend: SimulatedBackend
    requests: Counter[str]
    """Requests to the store from the first group to the commit, by kind; those of workers are among them."""
    cluster: Cluster
    loop: VirtualLoop
    played_s: float
    """Time until every group was stored."""
    commit_s: float
    """Time of the commit itself."""
    real_s: float
    peak_bytes: int
    lines: list[str]
    """What the flow logged."""

    @property
    def journal_bytes(self) -> int:
        return self.backend.bytes_below(self.store.path(layout.journal(VERSION)))

    @property
    def manifest_bytes(self) -> int:
        return self.backend.bytes_below(self.store.path(layout.manifest(VERSION)))


class _Workers:
    """Lets workers join, and time pass, while a rollout is played (`tasks.rollout.workers.Workers`)."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._loop = cluster, cluster.loop

    async def play(self, plan: RolloutPlan, groups: SharedGroups) -> None:
        playing = asyncio.ensure_future(self._cluster.scheduler.play(plan, groups))
        await asyncio.sleep(0)  # the scheduler has it
        self._loop.call_soon_threadsafe(self._begin, plan.policy)
        await playing
        self._loop.wait_for_hold()

    def _begin(self, policy: PolicyVersion) -> None:
        """Begin in the loop's own thread, so that what happens first does not depend on threads."""
        for _ in range(self._cluster.scenario.workers):
            self._cluster.join()
        self._cluster.scheduler.serve(policy)
        self._loop.release()


def simulate(scenario: Scenario) -> Outcome:
    """Play and commit an iteration."""
    world, lines = World(), list[str]()
    loop = VirtualLoop(world, lambda: backend.seconds, cpu=scenario.cpu)
    store, backend = simulated_store(scenario.latency_s, loop.time)
    drawn = problems(scenario)
    cluster = Cluster(scenario, world, backend, loop, {problem.problem_id: problem for problem in drawn})
    began = time.monotonic()
    with _virtual(loop, world), Lease(store, RUN, NEVER_S) as lease:
        provenance = Provenance(config={}, fence=lease)
        with Draft(store, "problems/x", "problems") as draft:
            draft.commit(provenance, [])
        with Draft(store, POLICY, "checkpoint") as draft:
            draft.commit(provenance, [])
        with (
            scheduler.Scheduler(30, 600, lines.append, loop=loop) as given,
            JournaledDraft(store, VERSION, "trajectories", lease) as draft,
        ):
            cluster.scheduler = given
            backend.requests.clear()
            plan = make_plan(scenario)
            metrics = play(plan, drawn, _Workers(cluster), draft, lines.append)  # type: ignore[arg-type]
            played_s, seconds, cpu = loop.time(), backend.seconds, time.thread_time()
            manifest = draft.commit(provenance, [POLICY, "problems/x"], metrics)
            requests = backend.requests.copy()
            commit_s = backend.seconds - seconds + (time.thread_time() - cpu) * scenario.cpu
    real_s, peak = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Outcome(manifest, store, backend, requests, cluster, loop, played_s, commit_s, real_s, peak, lines)


@contextlib.contextmanager
def _virtual(loop: VirtualLoop, world: World) -> Iterator[None]:
    """Let the modules that look at the clock see the virtual one."""
    with contextlib.ExitStack() as stack:
        gc.disable()  # collections would go through the events of all simulated workers
        stack.callback(gc.enable)
        for module in scheduler, jobs, outcomes:
            stack.enter_context(patch.object(module, "time", SimpleNamespace(monotonic=loop.time)))
        stack.enter_context(patch.object(worker, "time", SimpleNamespace(monotonic=lambda: world.now)))
        yield


def make_plan(scenario: Scenario) -> RolloutPlan:
    sizes = (
        f"rollout={{group_size: {scenario.group_size}, rows_per_shard: {scenario.rows_per_shard}, "
        f"concurrency: {scenario.slots}, problems_per_iteration: {scenario.episodes // scenario.group_size}}}"
    )
    config, gconfig = load("smoke", [f"run.name={RUN}", sizes]), GenerationConfig(max_new_tokens=1024)
    return RolloutPlan(f"{RUN}/000000", config, 0, POLICY, "problems/x", gconfig, scenario.group_size, selecting=True)


def problems(scenario: Scenario) -> list[Problem]:
    return [
        Problem(f"problem {i}", f"What is {i} + 1?", [str(i + 1)])
        for i in range(scenario.episodes // scenario.group_size)
    ]
