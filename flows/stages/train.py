"""Task: one update on stored trajectories and scores, committed as the next policy version."""

from collections.abc import Sequence
from dataclasses import replace

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from flows.run.workspace import Workspace
from flows.stages.score import taught
from storage import layout
from storage.telemetry.metrics import STALENESS
from storage.version_names import PolicyVersion
from storage.versions import aliases
from tasks.train.orders import OrderedTrainer, Part, UpdateOrder


@task(name="train", task_run_name="train-{iteration}", cache_policy=NO_CACHE)
def train(
    workspace: Workspace, trainer: OrderedTrainer, iteration: int, policy: PolicyVersion, parts: Sequence[Part]
) -> PolicyVersion:
    """Update `policy` on stored data, commit the checkpoint and return its version; skip the work if it exists."""
    version = layout.checkpoint(workspace.name, iteration + 1)
    config, first = workspace.config, layout.checkpoint(workspace.name, 0)
    with workspace.stage(version) as draft:
        if draft:
            if "teacher" in config.models.served():
                parts = [replace(part, teacher=taught(workspace, part.trajectories)) for part in parts]
            made = trainer.update(UpdateOrder(version, policy, parts), get_run_logger().info)
            draft.accept(made.files, made.nonce)
            data = [name for part in parts for name in (part.trajectories, part.scores, part.teacher) if name]
            parents = [policy, *data, *dict.fromkeys(config.problems.exclusions)]
            if (teacher := config.models.teacher) and teacher.checkpoint:
                parents.append(layout.checkpoint_of(teacher.checkpoint))
            draft.commit(workspace.provenance(), parents, made.metrics, first if config.policy.lora else None)
            for statistic in ("mean", "max") if "staleness/mean" in made.metrics else ():
                STALENESS.labels(statistic).set(made.metrics[f"staleness/{statistic}"])
            workspace.trim_cache(first, policy, version)
    aliases.advance(workspace.store, layout.latest(workspace.name), version, workspace.label)
    workspace.collect(version.number)
    return version
