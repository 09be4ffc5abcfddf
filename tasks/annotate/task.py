"""The Prefect task that asks models beside the policy about stored trajectories, and commits what they say."""

from collections.abc import Sequence
from functools import partial

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from configs.models import Role
from storage.telemetry.spans import stage
from storage.version_names import AnnotationsVersion, EvaluationVersion, TrajectoriesVersion
from storage.versions import datasets, manifests
from storage.versions.drafts import Draft, JournaledDraft
from tasks.inference.location import identities
from tasks.run.workspace import Workspace


def annotate(workspace: Workspace, trajectories: TrajectoriesVersion) -> dict[Role, AnnotationsVersion]:
    """Let models say what scorers and algorithm need, unless they have; return the versions by role.

    The teacher is not asked about evaluations.
    """
    config = workspace.config
    needed: Sequence[Role] = [
        role
        for role in config.models.served()
        if role in config.score.models or (role == "teacher" and not isinstance(trajectories, EvaluationVersion))
    ]
    return {role: annotate_by(workspace, role, trajectories) for role in needed}


def taught(workspace: Workspace, trajectories: TrajectoriesVersion) -> AnnotationsVersion:
    """Return the version of what a served teacher has said about trajectories.

    Raises:
        ValueError: it was not asked.
    """
    from tasks.annotate.annotating import asker, version_of

    config = workspace.config
    version = version_of(config, "teacher", asker(config, "teacher"), trajectories)
    if not manifests.committed(workspace.store, version):
        raise ValueError(
            f"there is no {workspace.store.uri(version)}: score {trajectories} first, which asks the teacher"
        )
    return version


@task(name="annotate", task_run_name="annotate-{role}", cache_policy=NO_CACHE)
def annotate_by(workspace: Workspace, role: Role, trajectories: TrajectoriesVersion) -> AnnotationsVersion:
    """Let one model annotate trajectories, unless it has; return the version of what it says."""
    from tasks.annotate.annotating import annotate_rows, asker, version_of

    config, store = workspace.config, workspace.store
    asks = asker(config, role)
    version = version_of(config, role, asks, trajectories)
    if manifests.committed(store, version):
        return version
    lease = workspace.lease if version.run == workspace.name else None
    draft = partial(JournaledDraft, fence=lease) if lease else Draft
    with stage("annotate", version, trajectories.number), draft(store, version, "annotations") as made:
        assert workspace.models
        rows = datasets.rows(store, trajectories, workspace.cache, asks.columns)
        model, tell = identities(config)[role], get_run_logger().info
        metrics = annotate_rows(role, model, asks, workspace.models, rows, made, tell)
        if metrics["problems"]:
            tell("models.%s said nothing to %d questions: %s", role, metrics["problems"], metrics["example"])
        evaluated = isinstance(trajectories, EvaluationVersion)
        provenance = workspace.provenance()
        made.commit(provenance.model_copy(update={"fence": None}) if evaluated else provenance, [trajectories], metrics)
    return version
