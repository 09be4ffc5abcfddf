"""The Prefect tasks that play episodes and commit them as trajectory data sets: one iteration, or a stream of them."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self

from prefect import State, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture
from prefect.states import Cancelled

from flows.run.workspace import Workspace
from flows.stages.problems import weights
from storage import layout, records
from storage.telemetry.spans import making
from storage.version_names import PolicyVersion, ProblemsVersion, TrajectoriesVersion
from storage.versions import manifests
from tasks.agents.chat import fetch_chat
from tasks.agents.problem_checks import describe_lacking, without_room
from tasks.inference.api import GenerationConfig, InferenceError
from tasks.problems import exclusions, mixture
from tasks.rollout.outcomes import FaultAlarm
from tasks.rollout.plan import Pool, RolloutPlan, draw_from, drawable

if TYPE_CHECKING:
    from tasks.rollout.play import Workers
    from tasks.rollout.stream import Stream

_DRAIN_S = 5.0
"""Longest wait for the end of a stream if the flow failed."""


@task(name="rollout", task_run_name="rollout-{iteration}", cache_policy=NO_CACHE)
def rollout(
    workspace: Workspace, workers: "Workers", iteration: int, policy: PolicyVersion, problem_set: ProblemsVersion
) -> TrajectoriesVersion:
    """Play an iteration with checkpoint `policy`, unless it is committed; return the version of its trajectories."""
    from tasks.rollout.play import play

    version = layout.trajectories(workspace.name, iteration)
    with workspace.stage(version) as draft:
        if draft:
            drawn, spare = _draw(workspace, problem_set, iteration)
            workers.serve(policy)
            plan = _plan(workspace, iteration, policy, problem_set)
            metrics = play(plan, drawn, workers, draft, get_run_logger().info, spare)
            draft.commit(workspace.provenance(), [policy, problem_set], metrics)
    return version


def _plan(workspace: Workspace, iteration: int, policy: PolicyVersion, problem_set: ProblemsVersion) -> RolloutPlan:
    config, sampling = workspace.config, workspace.config.sampling
    return RolloutPlan(
        name=f"{workspace.name}/{iteration:06d}",
        config=config,
        iteration=iteration,
        policy=policy,
        problem_set=problem_set,
        gconfig=GenerationConfig(1, sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens),
        group_size=config.rollout.generation_size or config.rollout.group_size,
        selecting=True,
    )


@task(name="rollout-stream", cache_policy=NO_CACHE)
def _play_stream(stream: "Stream") -> "bool | State[bool]":
    """Play a stream in a thread. If the flow stops it, the task is cancelled without error."""
    return stream.play() or Cancelled(message="the flow needs no more rollouts")


@task(name="rollout", task_run_name="rollout-{iteration}", cache_policy=NO_CACHE)
def _wait_for(workspace: Workspace, stream: "Stream", iteration: int) -> TrajectoriesVersion:
    """Wait until the stream has committed an iteration's trajectories; return their version."""
    with making(layout.trajectories(workspace.name, iteration)):
        version = stream.wait(iteration)
    workspace.record(version)
    return version


@functools.lru_cache(maxsize=1)
def _read_pools(workspace: Workspace, problem_set: ProblemsVersion) -> list[Pool]:
    """Return what a run draws from: one pool or, in a mixture, one of each member.

    Problem set, curriculum and exclusions are read once in a flow run, because none of them changes meanwhile.
    """
    config, everything = workspace.config, workspace.read_problems(problem_set)
    curriculum, versions = weights(workspace), config.problems.exclusions
    excluded = exclusions.read_exclusions(workspace.store, versions, workspace.cache)
    shares, pools = {member.name: member.weight for member in config.problems.members}, list[Pool]()
    for part, problems in mixture.by_member(config.problems, everything):
        chances = None
        with mixture.naming(part.where):
            if curriculum is not None:
                problems, chances = drawable(problems, curriculum)
            left = exclusions.left_of(problems, excluded)
        if versions:
            count, named = len(problems) - len(left), ", ".join(versions)
            get_run_logger().info("%s%d of %d problems are excluded by %s", part.where, count, len(problems), named)
        playable = {problem.problem_id for problem in left}
        pools.append(Pool(problems, chances, playable, part.name, shares.get(part.name, 1.0)))
    first = layout.checkpoint(workspace.name, 0)  # all policies of a run have the same tokenizer
    drawn_from = [problem for pool in pools for problem in pool.problems]
    without_room = unplayable(workspace, first, drawn_from)
    return [replace(pool, playable=pool.playable - without_room) for pool in pools]


def unplayable(workspace: Workspace, policy: PolicyVersion, problems: Sequence[records.Problem]) -> set[str]:
    """Return the ids of problems for which the context of a policy has no room, and name the first ones in the log.

    Raises:
        ProblemError: no other problem is left.
    """
    lacking = without_room(problems, fetch_chat(workspace.store, policy, workspace.cache), workspace.config)
    if lacking:
        get_run_logger().warning("%s: they are not played", describe_lacking(lacking, len(problems), workspace.config))
    return {problem.problem_id for problem in lacking}


def _draw(
    workspace: Workspace, problem_set: ProblemsVersion, iteration: int
) -> tuple[list[records.Problem], Iterator[records.Problem]]:
    """Draw the iteration's problems, and the spare ones that may replace rejected groups.

    Problems that `problems.exclusions` names, or that have no room, are replaced like rejected ones: the other problems
    stay the same.
    """
    pools, config = _read_pools(workspace, problem_set), workspace.config
    count = config.rollout.problems_per_iteration
    drawn, spare = draw_from(pools, count, iteration, config.run.seed)
    if len(drawn) < count:
        lacking = "a source" if len(pools) > 1 else "problems.train"
        message = "draw %d has %d problems, not rollout.problems_per_iteration=%d: %s has no more"
        get_run_logger().warning(message, iteration, len(drawn), count, lacking)
    return drawn, spare


class Rollouts:
    """The rollouts of a run, one iteration after another; a context manager that ends the stream.

    With `run.overlap`, a thread plays a stream (`tasks.rollout.stream`) while the iterations are scored and trained on;
    otherwise each iteration is played when it is taken.
    """

    def __init__(self, workspace: Workspace, workers: "Workers", problem_set: ProblemsVersion) -> None:
        self._workspace, self._workers, self._problem_set = workspace, workers, problem_set
        self._alarm = FaultAlarm()
        self._stream: Stream | None = None
        self._playing: PrefectFuture[bool | State[bool]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._stream and self._playing:
            self._stream.stop()
            self._playing.wait(None if kind is None else _DRAIN_S)

    def take(self, iteration: int, policy: PolicyVersion) -> TrajectoriesVersion:
        """Return the version of the iteration's trajectories; `policy` is the newest checkpoint.

        An alarm is logged if more episodes than before ended without a verdict.
        """
        workspace = self._workspace
        if not workspace.config.run.overlap:
            version = rollout(workspace, self._workers, iteration, policy, self._problem_set)
        else:
            if self._stream is None:
                from tasks.rollout.stream import Stream

                self._workers.serve(policy)
                self._stream = Stream(
                    _plan(workspace, policy.number, policy, self._problem_set),
                    max(workspace.config.run.iterations, iteration + 1),
                    lambda draw: _draw(workspace, self._problem_set, draw)[0],
                    self._workers,
                    workspace.store,
                    workspace.provenance(),
                    get_run_logger().info,
                )
                self._playing = _play_stream.submit(self._stream)
            version = _wait_for(workspace, self._stream, iteration)
        for alarm in self._alarm.raised_by(manifests.read(workspace.store, version).metrics):
            text = "ALARM: iteration %d: %s. See the column `reason` of %s"
            get_run_logger().warning(text, iteration, alarm, version)
        return version

    def swap(self, policy: PolicyVersion) -> None:
        """Serve a new policy: to the stream, whose requests go on, or in a thread, until the next rollout begins."""
        if self._stream:
            self._workers.serve(policy)
            self._stream.advance(policy)
        elif not self._workspace.config.plays_apart:
            self._workspace.behind(partial(self._begin_to_serve, policy))

    def _begin_to_serve(self, policy: PolicyVersion) -> None:
        try:
            self._workers.serve(policy)
        except (InferenceError, OSError) as error:
            get_run_logger().warning("%s; the next rollout tries to serve it again", error)
