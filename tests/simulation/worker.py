"""A worker in virtual time: it takes groups, stores and reports as `tasks.rollout.remote.worker` does."""

import asyncio
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from storage.version_names import PolicyVersion
from storage.versions.drafts import new_nonce
from storage.versions.manifests import File
from tasks.rollout.outcomes import FinishedGroup
from tasks.rollout.plan import RolloutPlan, Start
from tasks.rollout.remote.messages import (
    Failure,
    GroupOrder,
    Orders,
    Place,
    Report,
    StoredShard,
    WorkerLostError,
)
from tasks.rollout.remote.worker import BEAT_S, KEPT_S, PlayedRollout, Unreported
from tasks.score.scoring import ScoredShard, ShardOrder

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

GONE = WorkerLostError("its process has ended")


class SimulatedWorker:
    """A worker whose episodes only last (`tasks.rollout.remote.jobs.RemoteWorker`)."""

    plays = True

    def __init__(self, name: str, cluster: "Cluster") -> None:
        self.name, self._cluster = name, cluster
        self.lost = False
        self._asked: PolicyVersion | None = None
        self._rollouts: dict[int, SimulatedRollout] = {}
        self._unreported = Unreported(self._rollouts)
        self._writers: dict[Place, _Writer] = {}
        self._asking: asyncio.Future[Report] | None = None
        self._patient_until = 0.0

    @property
    def policy(self) -> PolicyVersion | None:
        """What it serves."""
        return self._unreported.policy

    async def give(self, orders: Orders) -> None:
        answer = self._cluster.send(orders)
        self._cluster.arrive(self._carry_out, orders, answer)
        await answer

    async def report(self, patience_s: float) -> Report:
        answer = self._cluster.send(None)
        self._cluster.arrive(self._ask, answer, patience_s)
        return self._cluster.received(await answer)

    async def score(self, order: ShardOrder) -> ScoredShard | Failure:
        raise NotImplementedError("it only plays")

    def end(self) -> None:
        self.lost = True

    def lose(self) -> None:
        """Lose everything, as a killed process does; the flow hears of it later."""
        if self.lost:
            return
        self.lost = True
        self._cluster.leave(self, sum(rollout.busy for rollout in self._rollouts.values()))
        if self._asking:
            self._cluster.answer(self._asking, GONE)
            self._asking = None

    def _carry_out(self, orders: Orders, answer: "asyncio.Future[None]") -> None:
        """See `Worker.give`."""
        if self.lost:
            self._cluster.answer(answer, GONE)
            return
        self._cluster.answer(answer, None)
        self._serve(orders.policy or self._asked)
        for number, plan in orders.begin.items():
            self._rollouts[number] = SimulatedRollout(number, plan, self, self._cluster)
        for number, groups in orders.groups.items():
            self._rollouts[number].add(groups)
        for order in orders.store:
            self._rollouts[order.rollout].take(order.number)
            self._writer(order.rollout, order.place).write(order.number)
        for place in orders.flush:
            if writer := self._writers.pop(place, None):
                writer.flush()
        for number in orders.end:
            self._rollouts.pop(number).end()
            self._cluster.loop.hold()  # the rollout is over
        self.note()

    def _serve(self, policy: PolicyVersion | None) -> None:
        """Load another policy, which takes a while; the last one that was asked for counts."""
        if policy and policy != self._asked:
            self._asked = policy
            self._cluster.world.after(self._cluster.load_s(), self._served, policy)

    def _served(self, policy: PolicyVersion) -> None:
        if self.lost or policy != self._asked:
            return
        if self.policy is None:
            self._cluster.serves()
        self._unreported.policy = policy
        for rollout in self._rollouts.values():
            rollout.fill()
        self.note()

    def _writer(self, rollout: int, place: Place) -> "_Writer":
        if place not in self._writers:
            self._writers[place] = _Writer(rollout, place, self, self._cluster)
        return self._writers[place]

    def note(self, finished: tuple[int, FinishedGroup] | None = None, stored: StoredShard | None = None) -> None:
        """See `Worker.note`. What happens at the same time is reported together."""
        self._unreported.add(finished, stored)
        self._cluster.world.after(0, self._tell_if_due)

    def _tell_if_due(self) -> None:
        patient = self._cluster.world.now < self._patient_until
        if self._asking and (self._unreported.is_urgent or (self._unreported.finished and not patient)):
            self._tell()

    def _ask(self, answer: "asyncio.Future[Report]", patience_s: float) -> None:
        """See `Worker.report`."""
        if self.lost:
            self._cluster.answer(answer, GONE)
            return
        self._asking, self._patient_until = answer, self._cluster.world.now + patience_s
        for rollout in self._rollouts.values():
            rollout.ahead.patience_s = patience_s
        if self._unreported.is_urgent:
            self._tell()
        else:
            self._cluster.world.after(patience_s, self._end_patience, answer)
            self._cluster.world.after(BEAT_S + 3 * patience_s, self._beat, answer)

    def _end_patience(self, answer: "asyncio.Future[Report]") -> None:
        if self._asking is answer and self._unreported.finished:
            self._tell()

    def _beat(self, answer: "asyncio.Future[Report]") -> None:
        if self._asking is answer:
            self._tell()

    def _tell(self) -> None:
        answer, self._asking = self._asking, None
        assert answer
        self._cluster.answer(answer, self._unreported.take())
        if any(rollout.idle for rollout in self._rollouts.values()):
            for writer in self._writers.values():
                writer.flush_older(KEPT_S)


class SimulatedRollout(PlayedRollout):
    """The groups that the flow gave to a worker, and the episodes that run, which a collector plays in a real one."""

    def __init__(self, number: int, plan: RolloutPlan, worker: SimulatedWorker, cluster: "Cluster") -> None:
        super().__init__(number, plan, lambda _: cluster.problems, worker.note)
        self._worker, self._cluster = worker, cluster
        self._left: dict[int, int] = {}
        """Episodes of running groups that have not ended."""
        self._beginning: Start | None = None
        self._unbegun = 0
        self._free = plan.config.rollout.concurrency
        self.fill()

    @property
    def busy(self) -> int:
        return self.plan.config.rollout.concurrency - self._free

    def add(self, orders: Sequence[GroupOrder]) -> None:
        self._cluster.note_begun(orders)
        super().add(orders)
        self.fill()

    def fill(self) -> None:
        """Begin episodes while there are free slots, as `tasks.rollout.collector.Collector.collect` does."""
        while self._worker.policy and not self.complete and not self._lacks_groups:
            if self._free < (1 if self._unbegun else self.plan.together):
                return
            if self._unbegun:
                self._begin_episode()
            elif start := self.next(self._worker.policy):
                self._beginning, self._unbegun = start, self.plan.group_size
                self._left[start.number] = self._unbegun

    def end(self) -> None:
        self._cluster.busy(-self.busy)
        super().end()

    def _begin_episode(self) -> None:
        self._unbegun -= 1
        self._free -= 1
        self._cluster.busy(1)
        self._cluster.world.after(self._cluster.episode_s(), self._episode_ends, self._beginning)

    def _episode_ends(self, start: Start) -> None:
        if self._worker.lost or self.complete:
            return
        self._free += 1
        self._cluster.busy(-1)
        self._left[start.number] -= 1
        if not self._left[start.number]:
            del self._left[start.number]
            self.write([], self._cluster.finished(start))
        self.fill()


class _Writer:
    """Uploads a shard when it has enough rows, one after the other."""

    def __init__(self, rollout: int, place: Place, worker: SimulatedWorker, cluster: "Cluster") -> None:
        self._rollout, self._place, self._worker, self._cluster = rollout, place, worker, cluster
        self._nonce, self._shards, self._numbers = new_nonce(), 0, list[int]()
        self._until = 0.0
        """When the uploads so far are done."""
        self._oldest = 0.0
        """When the first group that is in no shard yet was written here."""

    def write(self, number: int) -> None:
        if not self._numbers:
            self._oldest = self._cluster.world.now
        self._numbers.append(number)
        if self._rows >= self._cluster.scenario.rows_per_shard:
            self.flush()

    def flush_older(self, seconds: float) -> None:
        if self._cluster.world.now - self._oldest > seconds:
            self.flush()

    def flush(self) -> None:
        if not self._numbers:
            return
        name = f"part-{self._nonce}-{self._shards:05d}.parquet"
        path, size = f"{self._place.version}/{self._nonce}/{name}", self._rows * self._cluster.scenario.episode_bytes
        digest = hashlib.sha256(path.encode()).hexdigest()
        file = File(name=name, path=path, bytes=size, rows=self._rows, sha256=digest)
        self._until = max(self._until, self._cluster.world.now) + self._cluster.upload_s(path, size)
        self._cluster.world.at(self._until, self._done, StoredShard(self._rollout, file, self._numbers))
        self._shards, self._numbers = self._shards + 1, []

    @property
    def _rows(self) -> int:
        return len(self._numbers) * self._cluster.scenario.group_size

    def _done(self, stored: StoredShard) -> None:
        if not self._worker.lost:
            self._worker.note(stored=stored)
