"""The stream: no group is lost or played twice, however often it stops, and no token is older than allowed."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

from configs import Config, load
from storage import layout
from storage.objects.store import Store
from storage.records import TRAJECTORY_SCHEMA, Problem
from storage.versions import manifests
from storage.versions.datasets import ShardWriter
from storage.versions.drafts import JournaledDraft, Provenance
from tasks.inference.api import Completion, InferenceError, derive
from tasks.rollout.plan import RolloutPlan, draw
from tasks.rollout.stream import Stream
from tasks.rollout.workers import LocalWorker
from tasks.score.verifier import Verifier
from tests.rollout.conftest import RUN, check_stream, heavy_tail, policy, rows_of
from tests.support.rollout_helpers import GCONFIG
from tests.support.train_helpers import make_trajectory
from tests.support.waiting_engine import WaitingEngine

pytestmark = pytest.mark.usefixtures("without_weights")

GROUPS, SAMPLES, ITERATIONS = 3, 2, 6
PROBLEMS = [Problem(f"{i}+1", f"What is {i} + 1?", [str(i + 1)]) for i in range(9)]


def settings(staleness: int, *more: str) -> Config:
    sizes = f"problems_per_iteration: {GROUPS}, group_size: {SAMPLES}, rows_per_shard: 4, concurrency: 14"
    bound = f"rollout={{{sizes}, max_head_offpolicyness: {staleness}}}"
    return load("smoke", [f"run={{name: {RUN}, iterations: {ITERATIONS}, overlap: true}}", bound, *more])


@contextmanager
def streaming(
    store: Store, verifier: Verifier, config: Config, first: int, engine: WaitingEngine, *, end: int = ITERATIONS
) -> Iterator[tuple[Stream, Callable[[int], None]]]:
    """Play a stream in a thread until the block ends."""
    version = policy(first).version
    plan = RolloutPlan(f"{RUN}/0", config, first, version, "problems/x", GCONFIG, SAMPLES, selecting=True)
    workers = LocalWorker(engine, verifier, lambda version: policy(version.number))  # type: ignore[arg-type]
    workers.serve(version)
    drawn = partial(draw, PROBLEMS, GROUPS, seed=1)
    stream = Stream(plan, end, drawn, workers, store, Provenance(config={}), lambda _: None)

    def play() -> None:
        with suppress(InferenceError):  # `wait` raises it
            stream.play()

    player = threading.Thread(target=play)
    player.start()

    def advance(number: int) -> None:
        workers.serve(policy(number).version)
        stream.advance(policy(number).version)

    try:
        yield stream, advance
    finally:
        stream.stop()
        player.join()


def numbers_of(store: Store, iteration: int) -> list[int]:
    return list(manifests.read(store, layout.trajectories(RUN, iteration)).metrics["stream"]["groups"])


@pytest.mark.parametrize("staleness", [1, 4])
@pytest.mark.parametrize("flow_runs", [1, ITERATIONS])
def test_every_group_is_in_one_data_set(store: Store, verifier: Verifier, staleness: int, flow_runs: int) -> None:
    """Whether one flow run plays everything or each trains once and is killed: each drawn group is played once.

    Every data set is complete, the tokens' versions keep the bound, and all problems are drawn equally often.
    """
    iteration, engine = 0, WaitingEngine(heavy_tail)
    for _ in range(flow_runs):
        with streaming(store, verifier, settings(staleness), iteration, engine) as (stream, advance):
            for _ in range(ITERATIONS // flow_runs):
                assert stream.wait(iteration) == layout.trajectories(RUN, iteration)
                iteration += 1
                advance(iteration)
    rows = check_stream(store, ITERATIONS, GROUPS, SAMPLES, staleness)
    played = Counter(row.problem_id for row in rows)
    assert set(played.values()) == {GROUPS * ITERATIONS * SAMPLES // len(PROBLEMS)}


def test_long_groups_do_not_hold_up_the_others(store: Store, verifier: Verifier) -> None:
    """Group 0 does not end before data set 1 is committed. It is stored in the last data set that its bound allows."""
    release = threading.Event()

    class Stuck(WaitingEngine):
        async def generate(self, *asked: Any) -> list[Completion]:
            if asked[2] == stuck:  # its seed
                await asyncio.to_thread(release.wait)
            return await super().generate(*asked)

    config = settings(2)
    first = draw(PROBLEMS, GROUPS, 0, seed=1)[0]
    plan = RolloutPlan(f"{RUN}/000000", config, 0, policy(0).version, "problems/x", GCONFIG, SAMPLES)
    stuck = min(derive(prompt.seed, 0) for prompt in plan.group(first).prompts)
    with streaming(store, verifier, config, 0, Stuck(0.0)) as (stream, advance):
        for iteration in range(2):
            stream.wait(iteration)
            advance(iteration + 1)
        assert not manifests.committed(store, layout.trajectories(RUN, 2))
        release.set()
        stream.wait(2)
    assert 0 in numbers_of(store, 2)
    assert all(0 not in numbers_of(store, iteration) for iteration in range(2))


def test_rejected_groups_are_replaced_by_the_next_of_the_stream(store: Store, verifier: Verifier) -> None:
    """No answer is right, so every group is rejected: a data set is closed after about (1 + rounds) x its groups."""
    config = settings(1, "rollout.success_rate_lb=1.0", "rollout.max_resampling_rounds=1")
    with streaming(store, verifier, config, 0, WaitingEngine(0.0)) as (stream, _):
        stream.wait(0)
    metrics = manifests.read(store, layout.trajectories(RUN, 0)).metrics
    assert 2 * GROUPS <= metrics["groups"] == metrics["groups_rejected"] <= 4 * GROUPS  # some ran when it had enough
    assert {row.status for row in rows_of(store, 0)} == {"rejected"}


def test_an_error_of_the_engine_reaches_the_trainer(store: Store, verifier: Verifier) -> None:
    """Whoever waits for a data set gets the error that ended the stream."""
    refuse = Mock(side_effect=InferenceError("another version"))
    with (
        streaming(store, verifier, settings(1), 0, WaitingEngine(0.0, refuse)) as (stream, _),
        pytest.raises(InferenceError, match="another version"),
    ):
        stream.wait(0)


def test_what_a_program_before_the_stream_played_is_kept(store: Store, verifier: Verifier) -> None:
    """Its data sets hold one draw each, without numbers. The stream goes on with the groups of the next draw."""
    write_groups(store, commits=True)
    with streaming(store, verifier, settings(1), 0, WaitingEngine(0.0)) as (stream, _):
        stream.wait(1)
    played = [{row.problem_id for row in rows_of(store, index)} for index in range(2)]
    assert played == [{problem.problem_id for problem in draw(PROBLEMS, GROUPS, index, seed=1)} for index in range(2)]


def test_a_data_set_that_lacks_only_its_manifest_is_committed(store: Store, verifier: Verifier) -> None:
    """A flow run was killed after the last shard of the last data set: the next one has nothing to play."""
    write_groups(store, commits=False)
    with streaming(store, verifier, settings(1), 0, WaitingEngine(0.0), end=1) as (stream, _):
        assert stream.wait(0) == layout.trajectories(RUN, 0)
    assert {row.problem_id for row in rows_of(store, 0)} == {each.problem_id for each in draw(PROBLEMS, GROUPS, 0, 1)}


def test_groups_that_were_played_without_a_stream_are_played_again(store: Store, verifier: Verifier) -> None:
    """The journal of a flow run without `run.overlap` has no numbers."""
    write_groups(store, commits=False, numbered=False)
    with streaming(store, verifier, settings(1), 0, WaitingEngine(0.0)) as (stream, _):
        stream.wait(0)
    assert len(rows_of(store, 0)) == len(numbers_of(store, 0)) * SAMPLES == GROUPS * SAMPLES


def write_groups(store: Store, *, commits: bool, numbered: bool = True) -> None:
    """Write the groups of draw 0 as the first data set, and commit them, or leave them in its journal."""
    with JournaledDraft(store, layout.trajectories(RUN, 0), "trajectories") as draft:
        with ShardWriter(draft, TRAJECTORY_SCHEMA, 2) as writer:
            for number, problem in enumerate(draw(PROBLEMS, GROUPS, 0, seed=1)):
                name = problem.problem_id
                rows = [make_trajectory(f"{RUN}/0/{name}/{s}", [[7, 8]], problem=name) for s in range(SAMPLES)]
                note = {"problem_id": name, "rejected": False}
                writer.write_group(rows, note | {"group": number} if numbered else note)
        if commits:
            draft.commit(Provenance(config={}), ["problems/x"], {"generated_tokens": 0})
