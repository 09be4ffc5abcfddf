"""The Prefect task that grades stored answers and commits the verdicts as scores, separate from the trajectories."""

import time
from typing import TYPE_CHECKING

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from flows.run.workspace import Workspace
from flows.stages.annotate import annotate, counted_questions
from storage import layout
from storage.version_names import ScoresVersion, TrajectoriesVersion
from tasks.inference.location import model_fingerprints
from tasks.score.scoring import metrics_of, scorer_fingerprint

if TYPE_CHECKING:
    from tasks.rollout.play import Workers


@task(name="score", task_run_name="score-{iteration}", cache_policy=NO_CACHE)
def score(workspace: Workspace, workers: "Workers", iteration: int, trajectories: TrajectoriesVersion) -> ScoresVersion:
    """Grade `trajectories`, unless their scores are committed; return the version of the scores.

    Models beside the policy are asked first, a teacher, too, which is not asked for scores of another scorer.
    """
    store, settings = workspace.store, workspace.config
    version = layout.scores(workspace.name, iteration, scorer_fingerprint(settings.score, model_fingerprints(settings)))
    if not workspace.by_other_scorer:
        annotate(workspace, trajectories, ["teacher"])
    with workspace.stage(version) as draft:
        if draft:
            asked = annotate(workspace, trajectories, settings.score.models)
            started = time.monotonic()
            grades = workers.score(trajectories, draft, settings, asked)
            metrics = metrics_of(grades, settings.score, time.monotonic() - started) | counted_questions(store, asked)
            draft.commit(workspace.provenance(), [trajectories, *asked.values()], metrics)
    if workspace.by_other_scorer:
        get_run_logger().info("scored by another scorer than that of the run, which does not train on it: %s", version)
    return version
