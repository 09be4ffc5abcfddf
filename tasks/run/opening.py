"""Open a run: begin it, or continue it with the same configuration."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from configs import Config, ConfigError, as_begun, differences, unknown, up_to_date
from storage import layout
from storage.logs import catalog
from storage.logs.leases import Lease
from storage.versions import manifests
from storage.versions.drafts import Draft
from tasks.agents.problem_checks import lacking_room
from tasks.problems.exclusions import check_exclusions
from tasks.run.workspace import Workspace

MAY_CHANGE = (
    "run.iterations",
    "run.max_",
    "run.when_held",
    "storage.",
    "inference.",
    "trainer.",
    "cluster.",
    "ppo.parallel",
    "retrain.",
    "audit.",
    "problems.exclusions",
    "score.workers",
    "rollout.concurrency",
    "rollout.processes",
)
"""Knobs that may change while a run lasts: they say where and how long it works, not what it computes. Another mesh
(`ppo.parallel`) computes the same up to rounding."""
_TRIED = ("problems", "policy", "agent", "environment")
"""Sections that may change until policy version 0 is committed, since making it may show that they are unusable."""


@contextmanager
def open_leased(config: Config) -> Iterator[Workspace]:
    """Open the workspace of a run, or of a retraining, and hold its lease until the block ends.

    Raises:
        LeaseHeldError: another flow run holds the lease, and `run.when_held` is `stop`; the message names the holder.
        StorageError: `problems.exclusions` names something that is no version of exclusions; the message says what to
            do.
    """
    workspace, run = Workspace(config), config.run
    _check_exclusions(workspace)
    with Lease(workspace.store, run.name, when_held=run.when_held, label=workspace.label) as workspace.lease:
        yield workspace
        workspace.trim_cache()


@contextmanager
def open_run(config: Config) -> Iterator[Workspace]:
    """Open the workspace of a run under its lease, and begin or continue the run.

    Raises:
        ConfigError: the run was begun with another configuration; the message lists the differences.
        LeaseHeldError: see `open_leased`.
    """
    with open_leased(config) as workspace:
        shutil.rmtree(workspace.scratch, ignore_errors=True)  # left by a flow that was killed
        start_run(workspace)
        yield workspace


def _with_begun(config: Config, begun: dict[str, Any]) -> Config:
    """Fill in what the run was begun with, where the present configuration says nothing else.

    These are the knobs whose defaults have changed (`configs.stored.BEFORE`), and an empty `ppo.micro_batch_tokens`:
    another number would change the last bits of the weights.
    """
    config = as_begun(config, begun)
    tokens = begun.get("ppo", {}).get("micro_batch_tokens")
    if config.ppo.micro_batch_tokens is not None or not isinstance(tokens, int):
        return config
    return config.model_copy(update={"ppo": config.ppo.model_copy(update={"micro_batch_tokens": tokens})})


def _check_exclusions(workspace: Workspace) -> None:
    """Check `problems.exclusions` before anything is begun."""
    check_exclusions(workspace.store, workspace.config.problems.exclusions)


@contextmanager
def open_unleased(config: Config) -> Iterator[Workspace]:
    """Open the workspace of a flow that writes no run.

    It needs no lease: if another flow commits the same version at the same time, the contents are the same.

    Raises:
        StorageError: the store is empty, so the flow has nothing to read.
    """
    workspace = Workspace(config)
    catalog.check_not_empty(workspace.store)
    yield workspace
    workspace.trim_cache()


def _fixed_settings(workspace: Workspace) -> dict[str, Any]:
    """Return the configuration with which a run must continue.

    After the commit of policy version 0, the sections in `_TRIED` must be those of its manifest. Before, they may
    change, so they are taken from the present configuration. A committed curriculum fixes `problems` earlier.
    """
    begun = dict(manifests.read(workspace.store, layout.run(workspace.name)).settings)
    first = manifests.find(workspace.store, layout.checkpoint(workspace.name, 0))
    planned = first or manifests.find(workspace.store, layout.curriculum(workspace.name))
    present = up_to_date(workspace.config.model_dump(mode="json"))
    for section in _TRIED:
        manifest = planned if section == "problems" else first
        values = manifest.settings if manifest else present
        if section in values:
            begun[section] = values[section]
    return begun


@task(name="start-run", cache_policy=NO_CACHE)
def start_run(workspace: Workspace) -> None:
    """Commit the run's configuration; if the run exists already, refuse a different configuration.

    A knob that is not set, and follows the device or has another default now, stays as the run was begun.
    """
    version = layout.run(workspace.name)
    begins = not manifests.committed(workspace.store, version)
    if begins:
        with Draft(workspace.store, version, "run") as draft:
            draft.commit(workspace.provenance(), parents=[])
    begun = _fixed_settings(workspace)
    workspace.config = _with_begun(workspace.config, begun)
    _refuse_another(workspace.name, begun, workspace.config)
    if warning := lacking_room(workspace.config):
        get_run_logger().warning(warning)
    state = "begins" if begins else "continues"
    get_run_logger().info("run %s %s in %s", workspace.name, state, workspace.store.uri(f"runs/{workspace.name}"))


def _refuse_another(run: str, begun: dict[str, Any], config: Config) -> None:
    """Raise ConfigError if a run was `begun` with knobs that this program does not know, or with other values."""
    if unknown_knobs := [line for line in unknown(begun) if not line.startswith(MAY_CHANGE)]:
        raise ConfigError(
            f"run {run!r} was begun by a program with knobs that this one does not know:\n{_listing(unknown_knobs)}\n"
            "Upgrade this one if a newer program began it, or begin another run with run.name=…"
        )
    present = up_to_date(config.model_dump(mode="json"))
    if changed := [line for line in differences(begun, present) if not line.startswith(MAY_CHANGE)]:
        raise ConfigError(
            f"run {run!r} was begun with another configuration:\n{_listing(changed)}\n"
            "Restore it, or begin another run with run.name=…"
        )


def _listing(lines: list[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)
