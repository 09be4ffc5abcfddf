"""Task: play an evaluation set with a policy, judge the answers, and commit both."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from configs import Config
from configs.schema import HELD_OUT
from storage import layout
from storage.version_names import EvaluationVersion, PolicyVersion, ProblemsVersion, ScoresVersion
from storage.versions import manifests
from storage.versions.drafts import Draft, Provenance
from tasks.problems.task import read_problems
from tasks.run.workspace import Workspace

if TYPE_CHECKING:
    from tasks.evaluate.protocol import Protocol
    from tasks.inference.engine import Engine
    from tasks.score.verifier import Verifier


def evaluate(
    workspace: Workspace,
    engine: "Engine",
    verifier: "Verifier",
    policy: PolicyVersion,
    problem_set: ProblemsVersion,
    name: str = HELD_OUT,
) -> ScoresVersion:
    """The version of the scores of checkpoint `policy`'s greedy answers to the set called `name`."""
    from tasks.evaluate.protocol import greedy

    return play_set(workspace, engine, verifier, policy, greedy(workspace.config, name, problem_set))


def evaluate_sets(
    workspace: Workspace,
    engine: "Engine",
    verifier: "Verifier",
    policy: PolicyVersion,
    sets: dict[str, ProblemsVersion],
) -> dict[str, list[ScoresVersion]]:
    """By name of the set, the scores of `policy`'s greedy answers and, with `evaluation.samples`, of its sampled ones.

    Args:
        workspace: what to work with.
        engine: plays.
        verifier: judges.
        policy: version of a checkpoint, of any run.
        sets: version of each set by its name.
    """
    from tasks.evaluate.protocol import greedy, sampled

    config, found = workspace.config, dict[str, list[ScoresVersion]]()
    for name, problem_set in sets.items():
        protocols = (greedy(config, name, problem_set), sampled(config, name, problem_set))
        found[name] = [play_set(workspace, engine, verifier, policy, protocol) for protocol in protocols if protocol]
    return found


@task(name="evaluate", task_run_name="evaluate-{protocol.set_name}-{protocol.mode}", cache_policy=NO_CACHE)
def play_set(
    workspace: Workspace, engine: "Engine", verifier: "Verifier", policy: PolicyVersion, protocol: "Protocol"
) -> ScoresVersion:
    """The version of the scores of one evaluation; its trajectories are the version above it."""
    from tasks.score.scoring import scorer_fingerprint

    version = protocol.evaluation(policy)
    scores = layout.evaluation_scores(version, scorer_fingerprint(workspace.config.score))
    if not manifests.committed(workspace.store, version):
        _play(workspace, engine, verifier, policy, protocol)
    if not manifests.committed(workspace.store, scores):
        _score(workspace, verifier, version, scores, protocol)
    return scores


def _play(
    workspace: Workspace, engine: "Engine", verifier: "Verifier", policy: PolicyVersion, protocol: "Protocol"
) -> None:
    from storage.versions import checkpoints
    from tasks.inference.api import GenerationConfig
    from tasks.rollout.plan import RolloutPlan
    from tasks.rollout.play import load_chat, play

    config, store = _strict(workspace.config), workspace.store
    checkpoint = checkpoints.open_checkpoint(store, policy, workspace.cache)
    load_chat(checkpoint)  # a tokenizer that cannot be used is told before servers start
    engine.serve(checkpoint)
    run, number = policy.run, f"{checkpoint.number:06d}"
    plan = RolloutPlan(
        name=f"{run}/evaluation/{number}/{protocol.set_name}/{protocol.mode}",
        config=config,
        iteration=checkpoint.number,
        policy=checkpoint,
        problem_set=protocol.problem_set,
        gconfig=GenerationConfig(temperature=protocol.temperature, max_new_tokens=config.sampling.max_new_tokens),
        group_size=protocol.samples,
    )
    with _draft(workspace, protocol.evaluation(policy)) as draft:
        problems = read_problems(workspace, protocol.problem_set)
        metrics = play(plan, problems, engine, verifier, draft, get_run_logger().info)
        draft.commit(_provenance(workspace), [policy, protocol.problem_set], metrics)


def _draft(workspace: Workspace, version: EvaluationVersion) -> Draft:
    """With a journal where the version belongs to the run in hand; it would take over from others elsewhere."""
    from storage.versions.journal import JournaledDraft

    if version.run == workspace.name and workspace.lease:
        return JournaledDraft(workspace.store, version, "evaluation", workspace.lease)
    return Draft(workspace.store, version, "evaluation")


def _score(
    workspace: Workspace, verifier: "Verifier", version: EvaluationVersion, scores: ScoresVersion, protocol: "Protocol"
) -> None:
    """Judge an evaluation's trajectories; what they amount to goes into the manifest."""
    from storage.records import Score
    from storage.versions import datasets
    from tasks.evaluate.outcomes import COLUMNS, join, summarise, summarise_sampled
    from tasks.score.scoring import NEEDED, score_rows

    store, cache, judged = workspace.store, workspace.cache, list[Score]()
    config = _strict(workspace.config)
    rows = datasets.rows(store, version, cache, NEEDED)
    with Draft(store, scores, "scores") as draft:
        metrics = score_rows(rows, verifier, config.score, draft, config.rollout.rows_per_shard, judged.append)
        outcomes = join(datasets.rows(store, version, cache, COLUMNS), map(asdict, judged))
        numbers = summarise(outcomes) if protocol.mode == "greedy" else summarise_sampled(outcomes)
        about = {"set": protocol.set_name, "problem_set": protocol.problem_set}
        draft.commit(_provenance(workspace), [version], metrics | about | numbers)
    if protocol.mode == "greedy":
        first, any_turn = numbers["first_turn"], numbers["any_turn"]
        get_run_logger().info(
            "%s on %d problems of %s: first turn %.3f [%.3f, %.3f], any turn %.3f [%.3f, %.3f]",
            version.policy, numbers["episodes"], protocol.set_name, *first.values(), *any_turn.values(),
        )  # fmt: skip


def _provenance(workspace: Workspace) -> Provenance:
    """Without a lease's token: anybody may evaluate any policy, and of two who do, one's numbers stand."""
    return workspace.provenance().model_copy(update={"fence": None})


def _strict(config: Config) -> Config:
    """What failed would count as wrong: an evaluation stands that little of it that no policy gains by it."""
    share = config.evaluation.max_failed_share
    rollout = config.rollout.model_copy(update={"max_failed_share": min(share, config.rollout.max_failed_share)})
    score = config.score.model_copy(update={"max_failure_share": min(share, config.score.max_failure_share)})
    return config.model_copy(update={"rollout": rollout, "score": score})
