"""Task: one PPO update on stored trajectories and scores, committed as the next policy version."""

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from storage import layout
from storage.telemetry.metrics import STALENESS
from storage.telemetry.spans import stage
from storage.version_names import PolicyVersion, ScoresVersion, TrajectoriesVersion
from storage.versions import aliases, manifests
from storage.versions.drafts import Draft
from tasks.run.workspace import Workspace
from tasks.train.orders import OrderedTrainer, UpdateOrder


@task(name="train", task_run_name="train-{iteration}", cache_policy=NO_CACHE)
def train(
    workspace: Workspace,
    trainer: OrderedTrainer,
    iteration: int,
    policy: PolicyVersion,
    trajectories: TrajectoriesVersion,
    scores: ScoresVersion,
) -> PolicyVersion:
    """Update `policy` on `trajectories`, commit the checkpoint and return its version; skip the work if it exists."""
    store, version = workspace.store, layout.checkpoint(workspace.name, iteration + 1)
    if not manifests.committed(store, version):
        with stage("train", version, iteration):
            made = trainer.update(UpdateOrder(version, policy, trajectories, scores), get_run_logger().info)
            with Draft(store, version, "checkpoint", made.nonce) as draft:
                draft.accept(made.files)
                parents = [policy, trajectories, scores, *dict.fromkeys(workspace.config.problems.exclusions)]
                if teacher := workspace.config.models.teacher:
                    parents.append(layout.checkpoint_of(teacher.checkpoint))
                base = layout.checkpoint(workspace.name, 0) if workspace.config.policy.lora else None
                draft.commit(workspace.provenance(), parents, made.metrics, base)
        for statistic in ("mean", "max") if made.metrics["trajectories"] else ():
            STALENESS.labels(statistic).set(made.metrics[f"staleness/{statistic}"])
        workspace.trim_cache(layout.checkpoint(workspace.name, 0), policy, version)
    aliases.advance(store, layout.latest(workspace.name), version, workspace.label)
    workspace.record(version)
    workspace.collect(version.number)
    return version
