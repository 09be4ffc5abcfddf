"""Task: one PPO update on stored trajectories and scores, committed as the next policy version."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from storage import layout
from storage.records import Score
from storage.version_names import PolicyVersion, ScoresVersion, TrajectoriesVersion
from storage.versions import aliases, checkpoints, datasets, manifests
from storage.versions.checkpoints import Checkpoint
from tasks.problems.exclusions import read_exclusions, set_aside
from tasks.run.workspace import Workspace

if TYPE_CHECKING:
    from tasks.train.trainer_process import AnyTrainer

_NAMED = 20
"""Number of excluded trajectories that the log names."""


@task(name="train", task_run_name="train-{iteration}", cache_policy=NO_CACHE)
def train(
    workspace: Workspace,
    trainer: "AnyTrainer",
    iteration: int,
    policy: PolicyVersion,
    trajectories: TrajectoriesVersion,
    scores: ScoresVersion,
) -> PolicyVersion:
    """Update `policy` on `trajectories`, commit the checkpoint and return its version; skip the work if it exists."""
    store, cache = workspace.store, workspace.cache
    version = layout.checkpoint(workspace.name, iteration + 1)
    if manifests.committed(store, version):
        aliases.advance(store, layout.latest(workspace.name), version, workspace.label)
        return version
    must_load = trainer.holds != policy
    checkpoint = checkpoints.open_checkpoint(store, policy, cache, state=must_load)
    if must_load:
        first = layout.checkpoint(workspace.name, 0)
        needs_first = workspace.config.ppo.needs_first
        first_model = checkpoints.open_checkpoint(store, first, cache).model if needs_first else None
        trainer.load(checkpoint.model, checkpoint.state, workspace.config.run.seed, first_model)
    metrics = _update(workspace, trainer, checkpoint.number, trajectories, scores)
    with TemporaryDirectory(prefix="checkpoint-", dir=workspace.scratch) as scratch:
        model, state = Path(scratch) / "model", Path(scratch) / "state"
        trainer.save(model, state)
        _copy_tokenizer(checkpoint, model)
        parents = [policy, trajectories, scores, *dict.fromkeys(workspace.config.problems.exclusions)]
        provenance = workspace.provenance()
        checkpoints.commit(store, version, model, state, trainer.canary(), provenance, parents, metrics, cache)
    workspace.trim_cache(layout.checkpoint(workspace.name, 0), policy, version)
    trainer.holds = version
    aliases.advance(store, layout.latest(workspace.name), version, workspace.label)
    return version


def _update(
    workspace: Workspace, trainer: "AnyTrainer", number: int, trajectories: TrajectoriesVersion, scores: ScoresVersion
) -> dict[str, float]:
    """Update the trainer without the trajectories that `problems.exclusions` excludes; return the metrics."""
    store, cache, logger = workspace.store, workspace.cache, get_run_logger()
    rows, metrics = list(datasets.trajectories(store, trajectories, cache)), dict[str, float]()
    if versions := workspace.config.problems.exclusions:
        rows, excluded = set_aside(rows, trajectories, read_exclusions(store, versions, cache))
        metrics["trajectories/excluded"] = float(len(excluded))
        if excluded:
            logger.info("%d trajectories are excluded by %s: %s", len(excluded), ", ".join(versions), _short(excluded))
    score_rows = [Score(**row) for row in datasets.rows(store, scores, cache)]
    return trainer.update(rows, score_rows, number, logger.info) | metrics


def _short(ids: list[str]) -> str:
    return ", ".join(ids[:_NAMED]) + (f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else "")


def _copy_tokenizer(checkpoint: Checkpoint, model: Path) -> None:
    """Copy from the checkpoint before the files that the trainer does not write: tokenizer and chat template."""
    for path in checkpoint.model.iterdir():
        if not (model / path.name).exists() and path.suffix != ".safetensors":
            shutil.copyfile(path, model / path.name)
