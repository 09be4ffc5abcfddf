"""Task: decide which stored trajectories each update of a run trains on."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from configs import Config, ConfigError
from flows.run.workspace import Workspace, committed_updates
from storage import errors, layout, version_names
from storage.objects.store import Store
from storage.processes.child import end_with_parent, for_pools
from storage.version_names import select as select_names
from storage.versions import checkpoints, fetch, manifests
from tasks.agents.chat import differing_token
from tasks.fit.plan import check_condition, plan_updates, select_data
from tasks.tables.sets import DataSet, select
from tasks.train.orders import Part, read_order

_Result = TypeVar("_Result")


def with_versions(config: Config, data: Sequence[str]) -> Config:
    """Return the configuration with the versions that `data` or `fit.data` name; a run that began keeps its own.

    Raises:
        ConfigError: the algorithm trains on fresh episodes only.
        ValueError: see `select_data` and `check_condition`.
    """
    if not config.algorithm.offline:
        reason = "trains on what the policy itself has just played: use rft, dpo, kto or ppo"
        raise ConfigError(f"algorithm.type={config.algorithm.type} {reason}")
    if "teacher" in config.models.served():
        raise ValueError("models.teacher.path: stored data sets are not taught: give models.teacher.checkpoint=RUN@N")
    store, named = Store(config.storage.root), list(data) or config.fit.data
    begun = manifests.find(store, layout.run(config.run.name))
    kept, scores = ((begun and begun.knob(f"fit.{knob}")) or [] for knob in ("data", "scores"))
    versions = _versions(store, named, kept)
    if not set(config.fit.scores) <= set(scores):
        scores = config.fit.scores
    config = config.model_copy(update={"fit": config.fit.model_copy(update={"data": versions, "scores": scores})})
    data_sets = select_data(store, config)
    if not kept:
        scores = [each.scores[-1] for each in data_sets]
        config = config.model_copy(update={"fit": config.fit.model_copy(update={"scores": scores})})
    if config.fit.where:
        _apart(check_condition, config)
    return config


def _versions(store: Store, named: Sequence[str], kept: list[str]) -> list[str]:
    """Return the versions that `named` means: those that a run has `kept`, if its data sets have only grown since."""
    versions = [each.version for each in select(store, named)] if named else []
    alone = {layout.split_uri(name)[1] for name in named}.intersection(versions)
    runs, new = {layout.run_of(version) for version in kept}, set(versions).difference(kept)
    grown = all(layout.run_of(version) in runs and version not in alone for version in new)
    return kept if grown and set(kept) <= set(versions) else versions


@task(name="plan-updates", cache_policy=NO_CACHE)
def plan(workspace: Workspace, policy: version_names.PolicyVersion) -> list[tuple[Part, ...]]:
    """Return the rows of each update, and set `run.iterations` to their number.

    Raises:
        ValueError: nothing is chosen, or the tokens of a data set mean something else to the policy.
        StorageError: a data set is missing or damaged.
    """
    config, cache = workspace.config, workspace.cache
    data_sets = select_data(workspace.store, config)
    _check_tokens(workspace, policy, data_sets)
    updates = _apart(plan_updates, workspace.store, config, data_sets, cache)
    _refuse_another_plan(workspace, updates)
    rows = sum(len(places) for parts in updates for part in parts for places in (part.rows or {}).values())
    epochs = config.fit.epochs
    numbers = (len(updates), "update"), (epochs, "epoch"), (rows // epochs, "trajectory"), (len(data_sets), "data set")
    get_run_logger().info("%s in %s: %s of %s", *(errors.counted(*number) for number in numbers))
    run = config.run.model_copy(update={"iterations": len(updates)})
    workspace.config = config.model_copy(update={"run": run})
    return updates


def _refuse_another_plan(workspace: Workspace, updates: Sequence[tuple[Part, ...]]) -> None:
    """Check that the newest update of a run that continues was of the rows that the plan gives it.

    Raises:
        ValueError: it was of others, so later updates would train on rows twice, or never.
    """
    if not (done := committed_updates(workspace)):
        return
    newest = layout.checkpoint(workspace.name, done)
    if done > len(updates) or tuple(read_order(workspace.store, newest, workspace.cache).parts) != updates[done - 1]:
        raise ValueError(
            f"{newest} was made of other rows than the plan has for it now: data sets were scored again, or another "
            "version of the program chooses otherwise. Train on them with another run.name; policy.path may be this "
            "checkpoint"
        )


def _apart(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Call a function in another process: one with DuckDB and torch would end with pages about leaked types."""
    with ProcessPoolExecutor(1, for_pools(), end_with_parent, (os.getpid(),)) as pool:
        return pool.submit(function, *arguments).result()


def _check_tokens(workspace: Workspace, policy: version_names.PolicyVersion, data_sets: Sequence[DataSet]) -> None:
    """Check that data sets have the tokenizer and the chat template of the policy.

    Raises:
        ValueError: one has another; the message names the first token that differs.
    """
    store, cache = workspace.store, workspace.cache
    own = checkpoints.open_checkpoint(store, layout.checkpoint(policy.run, 0), cache).model
    for run in dict.fromkeys(each.run for each in data_sets):
        made = [each.manifest for each in data_sets if each.run == run and each.manifest]
        parents = [name for manifest in made for name in manifest.parent_names]
        if sampled := select_names(version_names.PolicyVersion, parents):
            other = checkpoints.open_checkpoint(store, layout.checkpoint(min(sampled).run, 0), cache).model
        else:  # imported from another program
            other = fetch.fetch_folder(store, manifests.read(store, layout.run(run)), "model", cache)
        if difference := differing_token(own, other):
            raise ValueError(f"the data sets of {run} cannot be trained on by this policy: {difference}")
