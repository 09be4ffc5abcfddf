"""Groups are handed out to workers in other processes: none is lost or stored twice, whichever workers are lost."""

import asyncio
import errno
import gc
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Concatenate
from unittest.mock import Mock

import pytest

from configs import Config, load
from storage import layout
from storage.errors import DamagedError
from storage.objects.store import Store
from storage.records import Problem, Trajectory
from storage.version_names import PolicyVersion
from storage.versions import datasets, manifests
from storage.versions.checkpoints import Checkpoint
from storage.versions.drafts import Draft, JournaledDraft, Provenance
from tasks.inference.api import InferenceError
from tasks.rollout.outcomes import FinishedGroup
from tasks.rollout.plan import RolloutPlan, draw
from tasks.rollout.play import play
from tasks.rollout.remote.interface import P, T, WorkerFailedError, WorkerLostError
from tasks.rollout.remote.ledger import Attended, SharedRollout, StoreOrder
from tasks.rollout.remote.scheduler import Scheduler
from tasks.rollout.remote.worker import Destination, Worker
from tasks.rollout.stream import Stream
from tasks.rollout.workers import LocalWorker
from tasks.score.verifier import Verifier
from tests.rollout.conftest import RUN, check_stream, heavy_tail, policy, rows_of
from tests.support.rollout_helpers import GCONFIG
from tests.support.waiting_engine import WaitingEngine

pytestmark = pytest.mark.usefixtures("without_weights")

SAMPLES = 2
Seconds = Callable[[int], float]
PROBLEMS = [Problem(f"{i}+1", f"What is {i} + 1?", [str(i + 1)]) for i in range(40)]


def settings(*more: str) -> Config:
    sizes = "rollout={group_size: 2, rows_per_shard: 6, concurrency: 4, problems_per_iteration: 6}"
    return load("smoke", [f"run.name={RUN}", sizes, *more])


class ThreadWorker:
    """A worker that the flow takes for a process on another host. It runs in threads of the test's process.

    Attributes:
        killed: it has ended as by SIGKILL: what it does from then on reaches nobody.
        silent: it answers no more.
        delay_s: how long it takes to open a policy.
        answer_s: how late it says what it lacks.
        scoring: the error of its scores: its disk is full, say.
    """

    plays = True

    def __init__(self, name: str, engine: WaitingEngine, verifier: Verifier, store: Store) -> None:
        def open_slowly(version: PolicyVersion) -> Checkpoint:
            time.sleep(self.delay_s)
            return policy(version.number)

        self.name, self.got, self.scored = name, 0, 0
        self.local = LocalWorker(engine, verifier, open_slowly)  # type: ignore[arg-type] # it has the interface
        self.worker = Worker(self.local, store, lambda _: {problem.problem_id: problem for problem in PROBLEMS})
        self.killed = self.silent = False
        self.delay_s = self.answer_s = 0.0
        self.scoring: Exception | None = None

    async def call(
        self, method: Callable[Concatenate[Worker, P], Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        self._check()
        self.got += method is Worker.play
        self.scored += method is Worker.score
        try:
            if method is Worker.score and self.scoring:
                raise self.scoring
            result = await method(self.worker, *args, **kwargs)
            if method is Worker.lacking:
                await asyncio.sleep(self.answer_s)
        except Exception as error:
            raise WorkerFailedError(error, traceback.format_exc()) from error
        self._check()
        if self.silent:
            await asyncio.Event().wait()
        return result

    def end(self) -> None:
        """Do nothing: the team joins the threads."""

    def kill(self) -> None:
        self.killed = True

    def _check(self) -> None:
        if self.killed:
            raise WorkerLostError("killed")


FULL = OSError(errno.ENOSPC, "No space left on device")


@dataclass
class Team:
    """A scheduler and its workers."""

    store: Store
    verifier: Verifier
    scheduler: Scheduler
    seconds: Seconds
    log: list[str]
    workers: list[ThreadWorker]

    def join(self, seconds: Seconds | None = None) -> None:
        engine = WaitingEngine(seconds or self.seconds)
        worker = ThreadWorker(f"worker {len(self.workers)}", engine, self.verifier, self.store)
        self.workers.append(worker)
        self.scheduler.add(worker)


@contextmanager
def team(
    store: Store, verifier: Verifier, count: int, seconds: Seconds = heavy_tail, limits: tuple[float, float] = (30, 5)
) -> Iterator[Team]:
    """Open a team; the limits are `silence_s` and `start_s` of its scheduler."""
    log, workers = list[str](), list[ThreadWorker]()
    try:
        with Scheduler(*limits, log.append) as scheduler:
            made = Team(store, verifier, scheduler, seconds, log, workers)
            for _ in range(count):
                made.join()
            yield made
    finally:
        for worker in workers:
            worker.worker.__exit__()


def play_batch(made: Team, config: Config, spare: int = 0) -> list[Trajectory]:
    """Play all problems but the spare ones, and return what is committed."""
    version = layout.trajectories(RUN, 0)
    plan = RolloutPlan(f"{RUN}/000000", config, 0, policy(0).version, "problems/x", GCONFIG, SAMPLES, selecting=True)
    made.scheduler.serve(plan.policy)
    used = len(PROBLEMS) - spare
    with JournaledDraft(made.store, version, "trajectories") as draft:
        metrics = play(plan, PROBLEMS[:used], made.scheduler, draft, made.log.append, PROBLEMS[used:])
        draft.commit(Provenance(config={}), [plan.policy, "problems/x"], metrics)
    return rows_of(made.store, 0)


def check_whole(rows: list[Trajectory]) -> None:
    assert len({row.trajectory_id for row in rows}) == len(rows)
    assert Counter(row.problem_id for row in rows) == dict.fromkeys((each.problem_id for each in PROBLEMS), SAMPLES)


@pytest.mark.parametrize(
    ("late", "delays", "concurrency"), [("delay_s", (0, 0.3, 0.6), 4), ("answer_s", (0, 0.1, 0.1), 999)]
)
def test_nobody_gets_all_groups_because_others_begin_later(
    store: Store, verifier: Verifier, late: str, delays: Sequence[float], concurrency: int
) -> None:
    """The groups are shared fairly, though one of three workers serves the policy, or says what it lacks, first."""
    with team(store, verifier, 3, lambda _: 0.2) as made:
        play_batch(made, settings("rollout.concurrency=999"), spare=30)
        for delay, worker in zip(delays, made.workers, strict=True):
            setattr(worker, late, delay)
        before = [worker.got for worker in made.workers]
        made.scheduler.serve(policy(1).version)
        config = settings(f"rollout.concurrency={concurrency}")
        plan = RolloutPlan(f"{RUN}/1", config, 1, policy(1).version, "problems/x", GCONFIG, SAMPLES)
        with Draft(store, layout.trajectories(RUN, 1), "trajectories") as draft:
            play(plan, PROBLEMS, made.scheduler, draft, made.log.append)
        got = [worker.got - earlier for worker, earlier in zip(made.workers, before, strict=True)]
    assert sum(got) == len(PROBLEMS)
    assert max(got) <= 20


def test_a_slow_worker_gets_fewer_groups(store: Store, verifier: Verifier) -> None:
    """Groups are not dealt in advance: whoever is free gets the next one."""
    with team(store, verifier, 1, lambda _: 0.01) as made:
        made.join(lambda _: 1.0)
        began = time.monotonic()
        check_whole(play_batch(made, settings()))
        assert time.monotonic() - began < 10  # the slow one alone would need 20 s and more
        fast, slow = made.workers
        assert slow.got < fast.got / 3


@pytest.mark.parametrize("silent", [False, True], ids=["killed", "silent"])
def test_what_a_lost_worker_had_is_played_by_others(store: Store, verifier: Verifier, silent: bool) -> None:
    """Two of three workers are lost at random moments, and one joins: each group is stored once."""
    with team(store, verifier, 3, limits=(3 if silent else 30, 5)) as made:

        def lose() -> None:
            for worker in made.workers[:2]:
                time.sleep(random.uniform(0.02, 0.3))
                if silent:
                    worker.silent = True
                else:
                    worker.kill()
            made.join()

        loser = threading.Thread(target=lose)
        loser.start()
        rows = play_batch(made, settings())
        loser.join()
    check_whole(rows)
    metrics = manifests.read(store, layout.trajectories(RUN, 0)).metrics
    assert metrics["episodes"] == len(rows)


def test_orders_for_others_outlive_the_worker_that_finished_last(
    store: Store, verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is lost while the last group is entered, from which follows that the other one stores its groups."""
    enter = SharedRollout.finish

    def finish(rollout: SharedRollout, worker: Attended, finished: FinishedGroup) -> list[StoreOrder]:
        orders = enter(rollout, worker, finished)
        if orders and not any(each.killed for each in made.workers):
            assert isinstance(worker.remote, ThreadWorker)
            worker.remote.kill()
            while not any("is lost" in line for line in made.log):
                time.sleep(0.01)
        return orders

    monkeypatch.setattr(SharedRollout, "finish", finish)
    with team(store, verifier, 2, lambda _: 0.01) as made:
        check_whole(play_batch(made, settings("rollout.rows_per_shard=999")))
        assert any(each.killed for each in made.workers)


def test_a_shard_that_nobody_wants_any_more(store: Store, verifier: Verifier) -> None:
    """The end of a rollout may overtake the order to store a shard."""
    with team(store, verifier, 1) as made:
        to = Destination(layout.trajectories(RUN, 0), "trajectories", 0)
        assert asyncio.run(made.workers[0].worker.store(1, [0], to)) is None


def test_an_error_of_the_agent_ends_the_rollout(store: Store, verifier: Verifier) -> None:
    """An error that would come again on every host is raised at once, with the worker's traceback."""
    with team(store, verifier, 2) as made, pytest.raises(ValueError, match="no_such_argument") as raised:
        play_batch(made, settings("agent.args.no_such_argument=1"))
    assert "in another process" in "".join(raised.value.__notes__)


@pytest.mark.parametrize("stays", [0, 1])
def test_workers_with_a_broken_host(store: Store, verifier: Verifier, stays: int) -> None:
    """A full disk on one host costs only its worker. If no worker is left, its error ends the rollout."""
    with team(store, verifier, 2) as made:
        for worker in made.workers[stays:]:
            worker.local.serve = Mock(side_effect=FULL)  # type: ignore[method-assign]
        if stays:
            check_whole(play_batch(made, settings()))
        else:
            with pytest.raises(OSError, match="No space left") as raised:
                play_batch(made, settings())
            assert raised.value.errno == errno.ENOSPC  # the flow says what frees room


def test_no_worker_comes_after_a_loss(store: Store, verifier: Verifier) -> None:
    """The error says why the last one was lost."""
    with team(store, verifier, 1, limits=(30, 0.5)) as made:
        made.workers[0].kill()
        with pytest.raises(InferenceError, match=r"no worker for 0.5 s \(cluster.startup_timeout_s\): killed"):
            play_batch(made, settings())


def test_a_worker_that_lags_skips_a_policy_that_was_collected(store: Store, verifier: Verifier) -> None:
    """While it fetched a policy a newer one came, and the run deleted the older. It serves the newer one."""
    with team(store, verifier, 1) as made:
        (worker,), served, later = made.workers, list[str](), threading.Event()
        serve = worker.local.serve

        def lag(asked: PolicyVersion) -> None:
            served.append(asked)
            if asked == policy(0).version:
                made.scheduler.serve(policy(1).version)
                time.sleep(0.1)
                raise DamagedError("was collected by gc")
            serve(asked)
            later.set()

        worker.local.serve = lag  # type: ignore[assignment]
        made.scheduler.serve(policy(0).version)
        assert later.wait(60)
        assert served == [policy(0).version, policy(1).version]
        assert made.log == []


@pytest.mark.parametrize("loss", [False, True])
def test_a_stream_over_workers(store: Store, verifier: Verifier, loss: bool) -> None:
    """The bound on staleness holds, each group is in one data set, and swaps reach all workers while they play.

    Where workers are lost, an evaluation is played at the same time: its groups are all there, too.
    """
    iterations, staleness = 6, 2
    config = settings(f"rollout.max_head_offpolicyness={staleness}", f"run.iterations={iterations}", "run.overlap=true")
    size = config.rollout.problems_per_iteration
    with team(store, verifier, 3) as made:
        made.scheduler.serve(policy(0).version)
        plan = RolloutPlan(f"{RUN}/0", config, 0, policy(0).version, "problems/x", GCONFIG, SAMPLES, selecting=True)
        drawn = partial(draw, PROBLEMS, size, seed=1)
        stream = Stream(plan, iterations, drawn, made.scheduler, store, Provenance(config={}), made.log.append)
        player = threading.Thread(target=stream.play)
        player.start()
        if loss:
            threading.Timer(0.2, made.workers[2].kill).start()
            with Draft(store, layout.trajectories(RUN, 9), "trajectories") as draft:
                evaluation = replace(plan, name=f"{RUN}/evaluation", selecting=False)
                metrics = play(evaluation, PROBLEMS, made.scheduler, draft, made.log.append)
                draft.commit(Provenance(config={}), [plan.policy, "problems/x"], metrics)
            check_whole(rows_of(store, 9))
        for iteration in range(iterations):
            stream.wait(iteration)
            made.scheduler.serve(policy(iteration + 1).version)
            stream.advance(policy(iteration + 1).version)
            if loss and iteration in (1, 3):
                made.workers[iteration].kill()
                made.join()
        stream.stop()
        player.join()
    check_stream(store, iterations, size, SAMPLES, staleness)


def test_shards_are_scored_by_all_workers(store: Store, verifier: Verifier, caplog: pytest.LogCaptureFixture) -> None:
    """Each turn gets one score, as from one process, though a worker is lost and another one has a full disk."""
    with team(store, verifier, 4) as made:
        rows = play_batch(made, settings())
        trajectories = layout.trajectories(RUN, 0)
        made.workers[0].scoring = FULL
        threading.Timer(0.05, made.workers[1].kill).start()
        with Draft(store, layout.scores(RUN, 0, "5c0e"), "scores") as draft:
            grades = made.scheduler.score(trajectories, draft, settings())
            scored = list(datasets.drafted(draft))
        with Draft(store, layout.scores(RUN, 0, "5c0f"), "scores") as draft:
            local = LocalWorker(None, verifier, lambda version: policy(version.number))
            alone = local.score(trajectories, draft, settings())
            expected = list(datasets.drafted(draft))
    assert grades.verdicts == alone.verdicts
    assert grades.verdicts.total() == sum(len(row.turns) for row in rows)
    assert sorted(map(str, scored)) == sorted(map(str, expected))
    assert sum(worker.scored > 0 for worker in made.workers) >= 3
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("error", [FULL, RuntimeError("the result cannot be sent")], ids=str)
def test_an_answer_that_no_worker_can_grade_ends_the_stage(store: Store, verifier: Verifier, error: Exception) -> None:
    """The stage ends if every disk is full, or with the first error that is not of a host."""
    with team(store, verifier, 2) as made:
        play_batch(made, settings())
        for worker in made.workers:
            worker.scoring = error
        with Draft(store, layout.scores(RUN, 0, "5c0e"), "scores") as draft, pytest.raises(type(error)) as raised:
            made.scheduler.score(layout.trajectories(RUN, 0), draft, settings())
    assert str(error) in str(raised.value)
