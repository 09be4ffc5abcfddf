"""Task: one update on stored trajectories and scores, committed as the next policy version."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from flows.run.workspace import Workspace
from flows.stages.score import taught
from storage import layout
from storage.telemetry.metrics import STALENESS
from storage.telemetry.spans import making
from storage.version_names import PolicyVersion
from storage.versions import aliases, manifests
from storage.versions.drafts import Draft, Provenance
from tasks.train.orders import OrderedTrainer, Part, UpdateOrder


@task(name="train", task_run_name="train-{iteration}", cache_policy=NO_CACHE)
def train(
    workspace: Workspace,
    trainer: OrderedTrainer,
    iteration: int,
    policy: PolicyVersion,
    parts: Sequence[Part],
    swap: Callable[[PolicyVersion], object] = lambda _: None,
    since: float | None = None,
) -> PolicyVersion:
    """Update `policy` on stored data, unless that is committed; return the version of the checkpoint.

    Args:
        workspace: of the run. `Workspace.settle` waits until the checkpoint is committed: while the next rollout plays,
            if the engine of this process can serve its weights before, which is the case unless others play or train.
        trainer: makes the update.
        iteration: its number.
        policy: the newest one.
        parts: the data.
        swap: called with the new version once it can be served.
        since: when the iteration began, by the monotonic clock.
    """
    workspace.settle()  # the update changes what the checkpoint before is written from
    version, config = layout.checkpoint(workspace.name, iteration + 1), workspace.config
    if manifests.committed(workspace.store, version):
        _follow(workspace, version)
        swap(version)
        return version
    if "teacher" in config.models.served():
        parts = [replace(part, teacher=taught(workspace, part.trajectories)) for part in parts]
    with making(version):
        updated = trainer.update(order := UpdateOrder(version, policy, parts), get_run_logger().info)
        metrics = updated.metrics | ({"time/iteration": time.monotonic() - since} if since else {})
        for statistic in ("mean", "max") if "staleness/mean" in metrics else ():
            STALENESS.labels(statistic).set(metrics[f"staleness/{statistic}"])
        workspace.trained = updated.policy
        store = partial(_store, workspace, trainer, order, metrics, workspace.provenance())
        if updated.policy and not config.plays_apart and not config.run.overlap:
            swap(version)  # first, since the next rollout waits for it
            workspace.behind(store)
        else:  # engines read it from the store
            store()
            swap(version)
    return version


def _store(
    workspace: Workspace, trainer: OrderedTrainer, order: UpdateOrder, metrics: dict[str, Any], provenance: Provenance
) -> None:
    """Write and commit the checkpoint that an update has made."""
    config, first = workspace.config, layout.checkpoint(workspace.name, 0)
    made = trainer.write()
    with Draft(workspace.store, order.version, "checkpoint", made.nonce) as draft:
        draft.accept(made.files)
        data = [name for part in order.parts for name in (part.trajectories, part.scores, part.teacher) if name]
        parents = [order.policy, *data, *dict.fromkeys(config.problems.exclusions)]
        if (teacher := config.models.teacher) and teacher.checkpoint:
            parents.append(layout.checkpoint_of(teacher.checkpoint))
        draft.commit(provenance, parents, metrics, first if config.policy.lora else None)
    workspace.record(order.version)
    workspace.trim_cache(first, order.policy, order.version)
    _follow(workspace, order.version)


def _follow(workspace: Workspace, version: PolicyVersion) -> None:
    """Do what follows the commit of a checkpoint: it is the run's latest, and older ones may go."""
    aliases.advance(workspace.store, layout.latest(workspace.name), version, workspace.label)
    workspace.collect(version.number)
