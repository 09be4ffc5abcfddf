"""The Prefect tasks that ask models about stored trajectories, and grade stored answers; both are versions apart."""

import asyncio
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from configs import Config
from configs.models import Role
from flows.run.workspace import Workspace
from storage import layout
from storage.version_names import AnnotationsVersion, ScoresVersion, TrajectoriesVersion, Version
from storage.versions import datasets, manifests
from storage.versions.drafts import Draft
from tasks.score.scoring import metrics_of

if TYPE_CHECKING:
    from tasks.rollout.play import Workers


def annotate(
    workspace: Workspace, trajectories: TrajectoriesVersion, roles: Iterable[Role]
) -> dict[Role, AnnotationsVersion]:
    """Let those of some models that are served say what they have not said yet; return the versions by role."""
    served = workspace.config.models.served()
    return {role: annotate_by(workspace, role, trajectories) for role in roles if role in served}


def grade(
    workspace: Workspace, workers: "Workers", draft: Draft, trajectories: TrajectoriesVersion, config: Config
) -> tuple[dict[str, Any], list[Version]]:
    """Ask the models that scorers ask, then grade trajectories into a draft; return its metrics and its parents."""
    asked = annotate(workspace, trajectories, config.score.models)
    started, names = time.monotonic(), ("asked", "distinct", "problems", "seconds")
    grades = workers.score(trajectories, draft, config, asked)
    metrics = metrics_of(grades, config.score, time.monotonic() - started)
    made = {role: manifests.read(workspace.store, version).metrics for role, version in asked.items()}
    if made:
        metrics["models"] = {role: {name: of[name] for name in names} for role, of in made.items()}
    return metrics, [trajectories, *asked.values()]


def taught(workspace: Workspace, trajectories: TrajectoriesVersion) -> AnnotationsVersion:
    """Return the version of what a served teacher has said about trajectories.

    Raises:
        ValueError: it was not asked.
    """
    from tasks.annotate.annotating import asker

    version = asker(workspace.config, "teacher").version(trajectories)
    if not manifests.committed(workspace.store, version):
        raise ValueError(
            f"there is no {workspace.store.uri(version)}: score {trajectories} first, which asks the teacher"
        )
    return version


@task(name="annotate", task_run_name="annotate-{role}", cache_policy=NO_CACHE)
def annotate_by(workspace: Workspace, role: Role, trajectories: TrajectoriesVersion) -> AnnotationsVersion:
    """Let one model annotate trajectories, unless it has; return the version of what it says."""
    from tasks.annotate.annotating import asker

    annotator, log = asker(workspace.config, role), get_run_logger().info
    version = annotator.version(trajectories)
    with workspace.stage(version) as draft:
        if draft:
            assert workspace.models
            rows = datasets.rows(workspace.store, trajectories, workspace.cache, annotator.columns)
            metrics = asyncio.run(annotator.annotate(workspace.models, rows, draft, log))
            if metrics["problems"]:
                log("models.%s said nothing to %d questions: %s", role, metrics["problems"], metrics["example"])
            draft.commit(workspace.provenance(), [trajectories], metrics)
    return version


@task(name="score", task_run_name="score-{iteration}", cache_policy=NO_CACHE)
def score(workspace: Workspace, workers: "Workers", iteration: int, trajectories: TrajectoriesVersion) -> ScoresVersion:
    """Grade `trajectories`, unless their scores are committed; return the version of the scores.

    Models beside the policy are asked first, a teacher, too, which is not asked for scores of another scorer.
    """
    version = layout.scores(workspace.name, iteration, workspace.scorer)
    if not workspace.by_other_scorer:
        annotate(workspace, trajectories, ["teacher"])
    with workspace.stage(version) as draft:
        if draft:
            metrics, parents = grade(workspace, workers, draft, trajectories, workspace.config)
            draft.commit(workspace.provenance(), parents, metrics)
    if workspace.by_other_scorer:
        text = "scored by another scorer or program than the run's own, so the run does not train on it: %s"
        get_run_logger().info(text, version)
    return version
