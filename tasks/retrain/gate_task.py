"""Tasks: champion against challenger, and the alias that the better one gets."""

from typing import TYPE_CHECKING, Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from storage import layout
from storage.errors import AliasMovedError
from storage.logs.nights import Ending, Night
from storage.version_names import DecisionVersion, PolicyVersion, ScoresVersion
from storage.versions import aliases, manifests
from storage.versions.drafts import Draft
from tasks.run.workspace import Workspace

if TYPE_CHECKING:
    from tasks.train.trainer import Trainer

Evaluations = dict[PolicyVersion, dict[str, list[ScoresVersion]]]
"""By policy and name of the set: versions of scores, see `tasks.evaluate.task.evaluate_sets`."""


@task(name="crown-first", cache_policy=NO_CACHE)
def crown_first(workspace: Workspace, night: Night) -> PolicyVersion:
    """The champion that the night's challenger must beat: where there was none, policy version 0 becomes it."""
    if night.champion:
        return night.champion
    alias, first = workspace.config.retrain.champion, layout.checkpoint(workspace.name, 0)
    if aliases.current(workspace.store, alias) is None:
        aliases.move(workspace.store, alias, first, None, "first champion", workspace.label)
    return first


@task(name="measure-distance", cache_policy=NO_CACHE)
def measure_distance(
    workspace: Workspace, trainer: "Trainer", champion: PolicyVersion, challenger: PolicyVersion
) -> float | None:
    """Nats a token between challenger and champion, at the tokens of the night's last trajectories."""
    from storage.records import Score
    from storage.versions import checkpoints, datasets
    from storage.versions.lineage import trained_on

    store, cache, config = workspace.store, workspace.cache, workspace.config
    last = challenger.number - 1
    if last < 0:
        return None
    if trainer.holds != challenger:
        trainer.load(checkpoints.open_checkpoint(store, challenger, cache).model, None, config.run.seed)
        trainer.holds = challenger
    trajectories, scores = trained_on(store, workspace.name, last)
    other = checkpoints.open_checkpoint(store, champion, cache).model
    judged = (Score(**row) for row in datasets.rows(store, scores, cache))
    return trainer.distance(other, datasets.trajectories(store, trajectories, cache), judged)


@task(name="decide", cache_policy=NO_CACHE)
def decide(
    workspace: Workspace,
    champion: PolicyVersion,
    challenger: PolicyVersion,
    evaluations: Evaluations,
    distance: float | None,
) -> DecisionVersion:
    """The version of the gate's decision, with all its numbers; its parents are what it was decided by."""
    from tasks.retrain import gate
    from tasks.retrain.evidence import gather, summary_of

    store, version = workspace.store, layout.decision(workspace.name)
    if manifests.committed(store, version):
        return version
    settings = workspace.config.retrain.gate
    training, evidence = gather(store, workspace.cache, champion, challenger, evaluations, distance, settings)
    numbers: dict[str, Any] = {
        "champion": champion,
        "challenger": challenger,
        **gate.decide(evidence, settings).as_dict(),
        "gate": settings.model_dump(mode="json"),
        "comparisons": evidence.comparisons,
        "accuracy": {
            policy: {name: summary_of(store, versions) for name, versions in found.items()}
            for policy, found in evaluations.items()
        },
        "training": {"solved": training.solved, "tokens": training.tokens},
        "distance": distance,
        "failed_verdicts": evidence.failed_verdicts,
    }
    judged_by = [scores for found in evaluations.values() for versions in found.values() for scores in versions]
    with Draft(store, version, "decision") as draft:
        draft.commit(workspace.provenance(), list(dict.fromkeys([champion, challenger, *judged_by])), numbers)
    return version


@task(name="promote", cache_policy=NO_CACHE)
def promote(workspace: Workspace, night: Night, decision: DecisionVersion) -> Ending:
    """Point the champion's alias at the challenger, if the gate says so and nobody has moved it meanwhile."""
    numbers = manifests.read(workspace.store, decision).metrics
    if not numbers["promote"]:
        return "rejected"
    store, alias = workspace.store, workspace.config.retrain.champion
    moves, base = aliases.history(store, alias), night.move or 0
    if [move.version for move in moves[base : base + 2]] == [numbers["champion"], numbers["challenger"]]:
        return "promoted"  # by the flow run that this one continues, whatever has been done to the alias since
    try:
        if [move.version for move in moves[base:]] != [numbers["champion"]]:
            raise AliasMovedError(f"alias {alias!r} was moved by somebody else while the night lasted")
        aliases.move(store, alias, numbers["challenger"], base, f"night {night.number}: better", workspace.label)
    except AliasMovedError as error:
        get_run_logger().error("%s. No challenger is promoted over a champion that it was not compared with", error)
        return "overtaken"
    return "promoted"
