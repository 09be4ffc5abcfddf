"""The Prefect task that grades stored answers and commits the verdicts as scores, separate from the trajectories."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from storage import layout
from storage.version_names import ScoresVersion, TrajectoriesVersion
from storage.versions import datasets, manifests
from storage.versions.drafts import Draft
from tasks.run.workspace import Workspace
from tasks.score.scoring import NEEDED, score_rows, scorer_fingerprint
from tasks.score.verifier import Verifier


@task(name="score", task_run_name="score-{iteration}", cache_policy=NO_CACHE)
def score(workspace: Workspace, verifier: Verifier, iteration: int, trajectories: TrajectoriesVersion) -> ScoresVersion:
    """Grade `trajectories`, unless their scores are committed; return the version of the scores."""
    store, settings = workspace.store, workspace.config
    version = layout.scores(workspace.name, iteration, scorer_fingerprint(settings.score))
    if manifests.committed(store, version):
        return version
    rows = datasets.rows(store, trajectories, workspace.cache, NEEDED)
    with Draft(store, version, "scores") as draft:
        metrics = score_rows(rows, verifier, settings.score, draft, settings.rollout.rows_per_shard)
        draft.commit(workspace.provenance(), [trajectories], metrics)
    return version
