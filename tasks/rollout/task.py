"""The Prefect task that plays an iteration's episodes and commits them as a trajectory data set."""

from typing import TYPE_CHECKING

from prefect import State, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture
from prefect.states import Cancelled

from storage import layout
from storage.records import Problem
from storage.version_names import PolicyVersion, ProblemsVersion, TrajectoriesVersion
from storage.versions import checkpoints, manifests
from storage.versions.journal import JournaledDraft
from tasks.inference.api import EngineClosedError, GenerationConfig
from tasks.problems.curriculum_task import weights
from tasks.problems.exclusions import left_of, read_exclusions
from tasks.problems.task import read_problems
from tasks.rollout.plan import RolloutPlan, draw, spares
from tasks.run.workspace import Workspace
from tasks.score.verifier import Verifier

if TYPE_CHECKING:
    from tasks.inference.engine import Engine


@task(name="rollout", task_run_name="rollout-{iteration}", cache_policy=NO_CACHE)
def rollout(
    workspace: Workspace,
    engine: "Engine",
    verifier: Verifier,
    iteration: int,
    policy: PolicyVersion,
    problem_set: ProblemsVersion,
) -> TrajectoriesVersion:
    """Play an iteration with checkpoint `policy`, unless it is committed; return the version of its trajectories."""
    from tasks.rollout.play import load_chat, play

    config, store = workspace.config, workspace.store
    version = layout.trajectories(workspace.name, iteration)
    if manifests.committed(store, version):
        return version
    drawn, spare = _draw(workspace, problem_set, iteration)
    checkpoint = checkpoints.open_checkpoint(store, policy, workspace.cache)
    load_chat(checkpoint)  # reports an unusable tokenizer before servers start
    engine.serve(checkpoint, or_newer=config.run.overlap)
    sampling = config.sampling
    plan = RolloutPlan(
        name=f"{workspace.name}/{iteration:06d}",
        config=config,
        iteration=iteration,
        policy=checkpoint,
        problem_set=problem_set,
        gconfig=GenerationConfig(1, sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens),
        group_size=config.rollout.generation_size or config.rollout.group_size,
        selecting=True,
    )
    with JournaledDraft(store, version, "trajectories", workspace.lease) as draft:
        metrics = play(plan, drawn, engine, verifier, draft, get_run_logger().info, spare)
        # A swap may bring newer weights of this run while episodes are played: the tokens record their versions.
        swapped_in = [n for n in metrics["policy_versions"] if n != checkpoint.number]
        parents = [policy, *(layout.checkpoint(workspace.name, number) for number in swapped_in), problem_set]
        draft.commit(workspace.provenance(), parents, metrics)
    return version


@task(name="rollout", task_run_name="rollout-{iteration}", cache_policy=NO_CACHE)
def _rollout_ahead(
    workspace: Workspace,
    engine: "Engine",
    verifier: Verifier,
    iteration: int,
    policy: PolicyVersion,
    problem_set: ProblemsVersion,
) -> "TrajectoriesVersion | State[TrajectoriesVersion]":
    """Play a rollout during scoring and training. If the flow ends meanwhile, the task is cancelled without error."""
    try:
        return rollout.fn(workspace, engine, verifier, iteration, policy, problem_set)
    except EngineClosedError as closed:
        return Cancelled(message=str(closed))


def _draw(workspace: Workspace, problem_set: ProblemsVersion, iteration: int) -> tuple[list[Problem], list[Problem]]:
    """Draw the iteration's problems, and the spare ones that may replace rejected groups.

    Problems that `problems.exclusions` names are replaced like rejected ones: the other problems stay the same.
    """
    config = workspace.config
    problems, seed, weigh = read_problems(workspace, problem_set), config.run.seed, weights(workspace)
    count, versions = config.rollout.problems_per_iteration, config.problems.exclusions
    drawn = draw(problems, count, iteration, seed, weigh)
    spare = spares(problems, drawn, iteration, seed, weigh)
    if versions:
        excluded = read_exclusions(workspace.store, versions, workspace.cache)
        left = left_of([*drawn, *spare], excluded)
        get_run_logger().info(
            "%d of %d problems are excluded by %s",
            len(drawn) + len(spare) - len(left),
            len(drawn) + len(spare),
            ", ".join(versions),
        )
        drawn, spare = left[:count], left[count:]
    return drawn, spare


def lagging_policy(workspace: Workspace, iteration: int) -> PolicyVersion | None:
    """Return the older checkpoint that plays an iteration because of `rollout.policy_lag`; None without a lag."""
    lag = workspace.config.rollout.policy_lag
    return layout.checkpoint(workspace.name, max(0, iteration - lag)) if lag else None


class Rollouts:
    """The rollouts of a run, one iteration after another.

    With `run.overlap`, a thread plays the next iteration while this one is scored and trained on. The next iteration
    begins with the policy that is the newest at that time; requests after a `swap` use the one just trained.
    """

    def __init__(
        self, workspace: Workspace, engine: "Engine", verifier: Verifier, problem_set: ProblemsVersion
    ) -> None:
        self._workspace, self._engine, self._verifier, self._problem_set = workspace, engine, verifier, problem_set
        self._ahead: PrefectFuture[TrajectoriesVersion | State[TrajectoriesVersion]] | None = None

    def take(self, iteration: int, policy: PolicyVersion) -> TrajectoriesVersion:
        """Return the version of the iteration's trajectories; `policy` is the newest checkpoint."""
        run = self._workspace.config.run
        playing = lagging_policy(self._workspace, iteration) or policy
        trajectories = rollout(*self._arguments(iteration, playing)) if self._ahead is None else self._ahead.result()
        assert isinstance(trajectories, TrajectoriesVersion)  # a cancelled rollout is never taken
        self._ahead = None
        following = layout.trajectories(self._workspace.name, iteration + 1)
        if run.overlap and iteration + 1 < run.iterations and not manifests.committed(self._workspace.store, following):
            self._ahead = _rollout_ahead.submit(*self._arguments(iteration + 1, policy))
        return trajectories

    def finish(self) -> None:
        """Wait for a rollout that plays ahead although no iteration follows, because a budget ended the run early."""
        if self._ahead is not None:
            self._ahead.wait()
            self._ahead = None

    def swap(self, policy: PolicyVersion) -> None:
        """Serve a new checkpoint to the rollout that plays ahead; its requests go on."""
        if self._ahead is not None:
            workspace = self._workspace
            self._engine.serve(checkpoints.open_checkpoint(workspace.store, policy, workspace.cache))

    def _arguments(
        self, iteration: int, policy: PolicyVersion
    ) -> "tuple[Workspace, Engine, Verifier, int, PolicyVersion, ProblemsVersion]":
        return self._workspace, self._engine, self._verifier, iteration, policy, self._problem_set
