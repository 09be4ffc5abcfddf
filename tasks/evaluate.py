"""Task: play the held-out problems with a policy, judge the answers, and commit both."""

from typing import TYPE_CHECKING

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from storage import layout, manifests
from tasks.rollout import read_problems
from tasks.score import score_version
from tasks.workspace import Workspace

if TYPE_CHECKING:
    from tasks.inference.engine import Engine
    from tasks.rewards.verifier import Verifier


@task(name="evaluate", task_run_name="evaluate-{policy}", cache_policy=NO_CACHE)
def evaluate(workspace: Workspace, engine: "Engine", verifier: "Verifier", policy: str, problem_set: str) -> str:
    """The version of the evaluation of checkpoint `policy`; its scores stand beside it."""
    from storage import datasets
    from tasks.evaluation.outcomes import read_outcomes, summarise
    from tasks.rewards.scoring import scorer_fingerprint

    config, store, cache = workspace.config, workspace.store, workspace.cache
    number = int(policy.rsplit("/", 1)[1])
    version = layout.evaluation(workspace.name, number)
    scores = layout.evaluation_scores(workspace.name, number, scorer_fingerprint(config.score))
    if not manifests.committed(store, version):
        _play(workspace, engine, verifier, policy, problem_set, version)
    if not manifests.committed(store, scores):
        score_version(workspace, verifier, version, scores)
        _, trajectory_files = datasets.shards(store, version, cache)
        _, score_files = datasets.shards(store, scores, cache)
        summary = summarise(read_outcomes(trajectory_files, score_files))
        first, any_turn = summary["first_turn"], summary["any_turn"]
        get_run_logger().info(
            "policy version %d on %d held-out problems: first turn %.3f [%.3f, %.3f], any turn %.3f [%.3f, %.3f]",
            number, summary["episodes"], *first.values(), *any_turn.values(),
        )  # fmt: skip
    return version


def _play(
    workspace: Workspace, engine: "Engine", verifier: "Verifier", policy: str, problem_set: str, version: str
) -> None:
    from storage import checkpoints
    from storage.journal import JournaledDraft
    from tasks.inference.api import GenerationConfig
    from tasks.rollouts.plan import Plan
    from tasks.rollouts.play import load_chat, play

    config, store = workspace.config, workspace.store
    checkpoint = checkpoints.open_checkpoint(store, policy, workspace.cache)
    load_chat(checkpoint)  # a tokenizer that cannot be used is told before servers start
    engine.serve(checkpoint)
    evaluation = config.evaluation
    plan = Plan(
        name=f"{workspace.name}/evaluation/{checkpoint.number:06d}",
        config=config,
        iteration=checkpoint.number,
        policy=checkpoint,
        problem_set=problem_set,
        gconfig=GenerationConfig(temperature=evaluation.temperature, max_new_tokens=config.sampling.max_new_tokens),
        group_size=evaluation.samples,
    )
    with JournaledDraft(store, version, "evaluation", workspace.lease) as draft:
        problems = read_problems(workspace, problem_set)
        metrics = play(plan, problems, engine, verifier, draft, get_run_logger().info)
        draft.commit(workspace.provenance(), [policy, problem_set], metrics)
