"""Tasks: compare the challenger with the champion, and move the champion's alias if the gate promotes."""

from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from storage import layout
from storage.errors import AliasMovedError
from storage.logs.nights import Ending, Night, Nights
from storage.version_names import DecisionVersion, PolicyVersion, ScoresVersion
from storage.versions import aliases, manifests
from storage.versions.drafts import Draft
from storage.versions.lineage import trained_on
from tasks.retrain import gate
from tasks.retrain.evidence import gather, summary_of
from tasks.retrain.planning import looks
from tasks.run.workspace import Workspace
from tasks.train.orders import DistanceOrder, OrderedTrainer

Evaluations = dict[PolicyVersion, dict[str, list[ScoresVersion]]]
"""Versions of scores by policy and name of the set, see `tasks.evaluate.task.evaluate_sets`."""


@task(name="crown-first", cache_policy=NO_CACHE)
def crown_first(workspace: Workspace, night: Night) -> PolicyVersion:
    """Return the champion that the night's challenger must beat; without a champion, policy version 0 becomes it."""
    if night.champion:
        return night.champion
    alias, first = workspace.config.retrain.champion, layout.checkpoint(workspace.name, 0)
    if aliases.current(workspace.store, alias) is None:
        aliases.move(workspace.store, alias, first, None, "first champion", workspace.label)
    return first


@task(name="measure-distance", cache_policy=NO_CACHE)
def measure_distance(
    workspace: Workspace, trainer: OrderedTrainer, champion: PolicyVersion, challenger: PolicyVersion
) -> float | None:
    """Compute the mean KL in nats per token of challenger and champion, at the night's last trajectories' tokens."""
    last = challenger.number - 1
    if last < 0:
        return None
    trajectories, scores = trained_on(workspace.store, workspace.name, last)
    return trainer.distance(DistanceOrder(challenger, champion, trajectories, scores))


@task(name="decide", cache_policy=NO_CACHE)
def decide(
    workspace: Workspace,
    retraining: Workspace,
    champion: PolicyVersion,
    challenger: PolicyVersion,
    evaluations: Evaluations,
    distance: float | None,
) -> DecisionVersion:
    """Commit the gate's decision with all its numbers, unless it exists, and return its version.

    The log of the `retraining` says how many gates have looked at the target set before. The parents are champion,
    challenger and the scores that were compared.
    """
    store, version = workspace.store, layout.decision(workspace.name)
    if manifests.committed(store, version):
        return version
    settings = workspace.config.retrain.gate
    look = looks(Nights(retraining.store, retraining.name).read())
    training, evidence = gather(store, workspace.cache, champion, challenger, evaluations, distance, look, settings)
    numbers: dict[str, Any] = {
        "champion": champion,
        "challenger": challenger,
        **gate.decide(evidence, settings).as_dict(),
        "gate": settings.model_dump(mode="json"),
        "comparisons": evidence.comparisons,
        "accuracy": {
            policy: {name: summary_of(store, versions) for name, versions in sets.items()}
            for policy, sets in evaluations.items()
        },
        "training": {"solved": training.solved, "tokens": training.tokens},
        "distance": distance,
        "failed_verdicts": evidence.failed_verdicts,
    }
    compared = [scores for sets in evaluations.values() for versions in sets.values() for scores in versions]
    with Draft(store, version, "decision") as draft:
        draft.commit(workspace.provenance(), list(dict.fromkeys([champion, challenger, *compared])), numbers)
    return version


@task(name="promote", cache_policy=NO_CACHE)
def promote(workspace: Workspace, night: Night, decision: DecisionVersion) -> Ending:
    """Point the champion's alias at the challenger, if the gate promotes it and the alias was not moved meanwhile."""
    numbers = manifests.read(workspace.store, decision).metrics
    if not numbers["promote"]:
        return "rejected"
    store, alias = workspace.store, workspace.config.retrain.champion
    moves, base = aliases.history(store, alias), night.move or 0
    if [move.version for move in moves[base : base + 2]] == [numbers["champion"], numbers["challenger"]]:
        return "promoted"  # an earlier flow run of this night moved the alias; later moves do not matter
    try:
        if [move.version for move in moves[base:]] != [numbers["champion"]]:
            raise AliasMovedError(f"alias {alias!r} was moved by another writer while the night lasted")
        aliases.move(store, alias, numbers["challenger"], base, f"night {night.number}: better", workspace.label)
    except AliasMovedError as error:
        get_run_logger().error("%s. The challenger is not promoted: it was not compared with this champion", error)
        return "overtaken"
    return "promoted"
