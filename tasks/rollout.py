"""Task: play an iteration's episodes and commit them as a trajectory data set."""

from typing import TYPE_CHECKING

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from storage import layout, manifests
from tasks.workspace import Workspace

if TYPE_CHECKING:
    from storage.records import Problem
    from tasks.inference.engine import Engine
    from tasks.rewards.verifier import Verifier


@task(name="rollout", task_run_name="rollout-{iteration}", cache_policy=NO_CACHE)
def rollout(
    workspace: Workspace, engine: "Engine", verifier: "Verifier", iteration: int, policy: str, problem_set: str
) -> str:
    """The version of iteration's trajectories, sampled from checkpoint `policy`."""
    from storage import checkpoints
    from tasks.inference.api import GenerationConfig
    from tasks.rollouts.plan import Plan, draw
    from tasks.rollouts.play import play

    config, store = workspace.config, workspace.store
    version = layout.trajectories(workspace.name, iteration)
    if manifests.committed(store, version):
        return version
    checkpoint = checkpoints.open_checkpoint(store, policy, workspace.cache)
    engine.serve(checkpoint)
    sampling = config.sampling
    plan = Plan(
        name=f"{workspace.name}/{iteration:06d}",
        config=config,
        iteration=iteration,
        policy=checkpoint,
        problem_set=problem_set,
        gconfig=GenerationConfig(1, sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens),
        group_size=config.rollout.group_size,
    )
    problems = draw(
        read_problems(workspace, problem_set), config.rollout.problems_per_iteration, iteration, config.run.seed
    )
    with manifests.Draft(store, version, "trajectories") as draft:
        metrics = play(plan, problems, engine, verifier, draft, get_run_logger().info)
        draft.commit(workspace.provenance(), [policy, problem_set], metrics)
    return version


def read_problems(workspace: Workspace, version: str) -> "list[Problem]":
    """The rows of a problem set."""
    from storage import datasets
    from storage.records import Problem

    return [Problem(**row) for row in datasets.rows(workspace.store, version, workspace.cache)]
