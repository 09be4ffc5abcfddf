"""Task: play an evaluation set with a policy, grade the answers, and commit both."""

from typing import TYPE_CHECKING

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from configs import Config
from configs.evaluate import HELD_OUT
from flows.run.workspace import Workspace
from flows.stages.rollout import unplayable
from flows.stages.score import grade
from storage import layout
from storage.version_names import EvaluationVersion, PolicyVersion, ProblemsVersion, ScoresVersion
from storage.versions import datasets, drafts, manifests
from tasks.evaluate.outcomes import COLUMNS, join, summarise, summarise_sampled
from tasks.evaluate.protocol import Protocol, greedy, sampled
from tasks.evaluate.summary import estimated
from tasks.inference import api
from tasks.rollout.plan import RolloutPlan

if TYPE_CHECKING:
    from tasks.rollout.play import Workers


def evaluate(
    workspace: Workspace, workers: "Workers", policy: PolicyVersion, held_out: ProblemsVersion
) -> ScoresVersion:
    """Evaluate checkpoint `policy` greedily on the held-out problems; return the version of its scores."""
    return play_set(workspace, workers, policy, greedy(workspace.config, HELD_OUT, held_out))


def evaluate_sets(
    workspace: Workspace, workers: "Workers", policy: PolicyVersion, sets: dict[str, ProblemsVersion]
) -> dict[str, list[ScoresVersion]]:
    """Evaluate `policy` on sets: greedily and, if `evaluation.samples` is set, with sampled episodes.

    Args:
        workspace: holds configuration and store.
        workers: serve the policy, play and grade.
        policy: version of a checkpoint of any run.
        sets: versions of the sets by name.

    Returns:
        by name of the set the versions of the scores: greedy, then sampled.
    """
    config, scores = workspace.config, dict[str, list[ScoresVersion]]()
    for name, problem_set in sets.items():
        protocols = (greedy(config, name, problem_set), sampled(config, name, problem_set))
        scores[name] = [play_set(workspace, workers, policy, protocol) for protocol in protocols if protocol]
    return scores


@task(name="evaluate", task_run_name="evaluate-{protocol.set_name}-{protocol.mode}", cache_policy=NO_CACHE)
def play_set(workspace: Workspace, workers: "Workers", policy: PolicyVersion, protocol: Protocol) -> ScoresVersion:
    """Play and grade one evaluation, unless both are committed; return the version of its scores.

    The name of the scores begins with the name of the evaluation, which holds the trajectories. Neither is fenced by a
    lease: any flow may evaluate any policy, and the first commit wins.
    """
    version = protocol.evaluation(policy)
    scores = layout.evaluation_scores(version, workspace.scorer)
    if not manifests.committed(workspace.store, scores):
        _play(workspace, workers, policy, protocol)
    with workspace.stage(scores) as draft:
        if draft:
            _score(workspace, workers, draft, version, protocol)
    return scores


def _play(workspace: Workspace, workers: "Workers", policy: PolicyVersion, protocol: Protocol) -> None:
    from tasks.rollout.play import play

    config = _with_strict_limits(workspace.config)
    plan = RolloutPlan(
        name=f"{policy.run}/evaluation/{policy.number:06d}/{protocol.set_name}/{protocol.mode}",
        config=config,
        iteration=policy.number,
        policy=policy,
        problem_set=protocol.problem_set,
        gconfig=api.GenerationConfig(temperature=protocol.temperature, max_new_tokens=config.sampling.max_new_tokens),
        group_size=protocol.samples,
    )
    with workspace.stage(protocol.evaluation(policy)) as draft:
        if draft:
            workspace.settle()  # the policy may have been trained just now
            workers.serve(policy)
            problems = workspace.read_problems(protocol.problem_set)
            without_room = unplayable(workspace, policy, problems)
            played = [problem for problem in problems if problem.problem_id not in without_room]
            metrics = play(plan, played, workers, draft, get_run_logger().info)
            metrics["without_room"] = len(without_room)
            draft.commit(workspace.provenance(), [policy, protocol.problem_set], metrics)


def _score(
    workspace: Workspace, workers: "Workers", draft: drafts.Draft, version: EvaluationVersion, protocol: Protocol
) -> None:
    """Grade an evaluation's trajectories and commit the scores, with the summary in the manifest."""
    config = _with_strict_limits(workspace.config)
    metrics, parents = grade(workspace, workers, draft, version, config)
    rows = datasets.rows(workspace.store, version, workspace.cache, COLUMNS)
    outcomes = join(rows, datasets.drafted(draft), config.score)
    numbers = summarise(outcomes) if protocol.mode == "greedy" else summarise_sampled(outcomes)
    played = {"set": protocol.set_name, "problem_set": protocol.problem_set}
    draft.commit(workspace.provenance(), parents, metrics | played | numbers)
    if protocol.mode == "greedy":
        estimates = {"first turn": numbers["first_turn"], "any turn": numbers["any_turn"]} | numbers["rewards"]
        get_run_logger().info(
            "%s on %d problems of %s: %s", version.policy, numbers["episodes"], protocol.set_name,
            ", ".join(f"{name} {estimated(estimate)}" for name, estimate in estimates.items() if estimate),
        )  # fmt: skip


def _with_strict_limits(config: Config) -> Config:
    """Tighten the limits on failures to `evaluation.max_failed_share`.

    Failures count as wrong, so the limits are tight enough that failures cannot decide a comparison.
    """
    share = config.evaluation.max_failed_share
    rollout = config.rollout.model_copy(update={"max_failed_share": min(share, config.rollout.max_failed_share)})
    score = config.score.model_copy(update={"max_failure_share": min(share, config.score.max_failure_share)})
    return config.model_copy(update={"rollout": rollout, "score": score})
