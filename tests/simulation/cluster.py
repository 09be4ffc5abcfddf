"""The workers of a simulation, which join and are lost, and what they measure together."""

import asyncio
import pickle
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from storage.records import Problem
from tasks.rollout.outcomes import Counts, FinishedGroup
from tasks.rollout.plan import Start
from tasks.rollout.remote.messages import GroupOrder, Orders, Report
from tasks.rollout.remote.scheduler import Scheduler
from tests.simulation.clock import VirtualLoop, World
from tests.simulation.store import SimulatedBackend
from tests.simulation.worker import SimulatedWorker


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated. The docstrings of its fields are the help of the command line."""

    workers: int = 50
    """workers at the beginning"""
    episodes: int = 20_000
    """episodes of an iteration"""
    group_size: int = 16
    """episodes of a group"""
    slots: int = 128
    """episodes that a worker plays at once"""
    median_s: float = 40.0
    """median length of an episode"""
    sigma: float = 0.7
    """spread of the logarithm of the lengths"""
    deadline_s: float = 600.0
    """longest episode"""
    load_s: float = 10.0
    """time in which a worker loads a policy, up to half more"""
    hours_between_losses: float = 1.0
    """mean life of a worker; 0: nobody is lost"""
    rejoin_s: float = 180.0
    """time until another worker joins for a lost one"""
    notice_s: float = 2.0
    """time until the flow hears that a worker is lost"""
    rows_per_shard: int = 256
    """rollout.rows_per_shard"""
    episode_bytes: int = 20_000
    """bytes of an episode in a shard"""
    upload_bytes_s: float = 2e8
    """bytes/s with which a worker uploads"""
    latency_s: float = 0.03
    """seconds of a request to the store"""
    network_s: float = 0.001
    """seconds of a message between the flow and a worker, one way"""
    call_cpu_s: float = 0.0
    """processor seconds of the flow for each call of a worker besides pickling, such as Ray's own"""
    seed: int = 1
    """seed of lengths and losses"""
    cpu: bool = False
    """let time pass while the flow computes; then no two simulations are the same"""


@dataclass(slots=True)
class Slots:
    """Integrals over the time: slot-seconds that were busy, and those that there were."""

    busy: int = 0
    all: int = 0
    busy_s: float = 0.0
    all_s: float = 0.0
    at: float = 0.0

    def change(self, now: float, busy: int, slots: int) -> None:
        self.busy_s += self.busy * (now - self.at)
        self.all_s += self.all * (now - self.at)
        self.at, self.busy, self.all = now, self.busy + busy, self.all + slots

    @property
    def utilisation(self) -> float:
        return self.busy_s / self.all_s


@dataclass
class Cluster:
    """All workers; `arrive` and `answer` are the network between them and the flow."""

    scenario: Scenario
    world: World
    backend: SimulatedBackend
    loop: VirtualLoop
    problems: dict[str, Problem]
    scheduler: Scheduler = field(init=False)
    slots: Slots = field(default_factory=Slots)
    begun: set[int] = field(default_factory=set)
    """Numbers of groups that a worker got."""
    all_begun: tuple[float, float] | None = None
    """Time and utilisation when the last group had been handed out for the first time."""
    last_finished_s: float = 0.0
    calls: Counter[str] = field(default_factory=Counter)
    message_bytes: int = 0
    lost: int = 0
    wasted: int = 0
    """Episodes that lost workers were playing."""
    joined: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.scenario.seed)
        self._groups = self.scenario.episodes // self.scenario.group_size

    def join(self) -> None:
        """Let another worker join, which will be lost at some time."""
        worker = SimulatedWorker(f"worker {self.joined}", self)
        self.joined += 1
        if self.scenario.hours_between_losses:
            self.world.after(self._random.expovariate(1 / 3600 / self.scenario.hours_between_losses), worker.lose)
        self.scheduler.add(worker)

    def serves(self) -> None:
        """Note that a worker serves its first policy."""
        self.slots.change(self.world.now, 0, self.scenario.slots)

    def leave(self, worker: SimulatedWorker, busy: int) -> None:
        """Note that a worker is lost, with so many episodes."""
        self.lost += 1
        self.wasted += busy
        self.slots.change(self.world.now, -busy, -self.scenario.slots if worker.policy else 0)
        self.world.after(self.scenario.rejoin_s, self.join)

    def busy(self, more: int) -> None:
        self.slots.change(self.world.now, more, 0)

    def note_begun(self, orders: Sequence[GroupOrder]) -> None:
        self.begun.update(order.number for order in orders)
        if len(self.begun) >= self._groups and not self.all_begun:
            self.slots.change(self.world.now, 0, 0)
            self.all_begun = self.world.now, self.slots.utilisation

    def episode_s(self) -> float:
        scenario = self.scenario
        return min(scenario.deadline_s, scenario.median_s * self._random.lognormvariate(0, scenario.sigma))

    def load_s(self) -> float:
        return self.scenario.load_s * self._random.uniform(1, 1.5)

    def upload_s(self, path: str, size: int) -> float:
        return self.backend.upload_by_worker(path) + size / self.scenario.upload_bytes_s

    def finished(self, start: Start) -> FinishedGroup:
        """Return the counts of a group of two-turn episodes, as `counts_of` makes them."""
        size, version, solved = self.scenario.group_size, start.plan.policy.number, self._random.randint(0, 8)
        self.last_finished_s = self.world.now
        counts = Counts()
        for key, count in (("status", "completed"), size), (("version", version), size), (("policy", version), size):
            counts[key] = count
        for name, count in ("tokens", 900 * size), ("sequences", size), ("generated", 700 * size), ("solved", solved):
            counts[name, None] = count
        for turn, count in enumerate((size, size - solved)):
            counts["turn", turn], counts["success", turn] = count, solved // (1 + turn)
        return FinishedGroup(start.number, start.problem.problem_id, rejected=False, counts=counts)

    def send(self, orders: Orders | None) -> "asyncio.Future[Any]":
        """Spend what a call of a worker costs the flow; return the future of its answer."""
        self.calls["give" if orders else "report"] += 1
        self.loop.spend(self.scenario.call_cpu_s)
        if orders and self.scenario.cpu:
            self.message_bytes += len(pickle.dumps(orders))
        return self.loop.create_future()

    def arrive(self, action: Callable[..., None], *arguments: Any) -> None:
        """Let the message of a call arrive at a worker."""
        self.world.at(self.loop.time() + self.scenario.network_s, action, *arguments)

    def answer(self, future: "asyncio.Future[Any]", value: Any) -> None:
        """Send the flow a worker's answer, or that it is lost."""
        sent = pickle.dumps(value) if self.scenario.cpu and isinstance(value, Report) else value
        delay = self.scenario.notice_s if isinstance(value, BaseException) else self.scenario.network_s
        self.world.after(delay, _settle, future, sent)

    def received(self, sent: Any) -> Report:
        """Read a report, in the flow's time."""
        if not self.scenario.cpu:
            assert isinstance(sent, Report)
            return sent
        self.message_bytes += len(sent)
        report: Report = pickle.loads(sent)
        return report


def _settle(future: "asyncio.Future[Any]", value: Any) -> None:
    if future.done():  # the flow no longer waits
        return
    if isinstance(value, BaseException):
        future.set_exception(value)
    else:
        future.set_result(value)
