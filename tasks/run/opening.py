"""Task: begin a run, or continue it with the same configuration."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from configs import Config, ConfigError, differences, unknown, up_to_date
from storage import layout
from storage.logs import catalog
from storage.logs.leases import Lease
from storage.versions import manifests
from storage.versions.drafts import Draft
from tasks.run.workspace import Workspace

MAY_CHANGE = (
    "run.iterations",
    "run.max_",
    "run.when_held",
    "run.lease_s",
    "storage.",
    "inference.",
    "retrain.",
    "audit.",
    "problems.exclusions",
    "score.workers",
    "rollout.concurrency",
    "rollout.request_",
)
"""Where and how long a run works may change while it lasts; what it computes may not."""
_TRIED = ("problems", "policy", "agent", "environment")
"""Sections that may prove unusable while policy version 0 is made; they may change until it is committed."""


@contextmanager
def open_leased(config: Config) -> Iterator[Workspace]:
    """The workspace of a run, or of a retraining, that this flow run alone may write, for the length of the block.

    Raises:
        LeaseHeldError: another flow run writes it, and `run.when_held` is `stop`; says who.
        StorageError: `problems.exclusions` names what is none; says what to do.
    """
    workspace, run = Workspace(config), config.run
    _check_exclusions(workspace)
    with Lease(workspace.store, run.name, run.lease_s, run.when_held, workspace.label) as workspace.lease:
        yield workspace
        workspace.trim_cache()


@contextmanager
def open_run(config: Config) -> Iterator[Workspace]:
    """The workspace of a run that begins, or goes on, and that is held.

    Raises:
        ConfigError: the run was begun with another configuration; says what differs.
        LeaseHeldError: see `hold`.
    """
    with open_leased(config) as workspace:
        shutil.rmtree(workspace.scratch, ignore_errors=True)  # of a flow that was killed
        start_run(workspace)
        yield workspace


def _check_exclusions(workspace: Workspace) -> None:
    """What cannot be honoured is told before anything is begun."""
    from tasks.problems.exclusions import check_exclusions

    check_exclusions(workspace.store, workspace.config.problems.exclusions)


@contextmanager
def open_unleased(config: Config) -> Iterator[Workspace]:
    """The workspace of a flow that writes no run: what it commits, another may commit beside it, and it is the same.

    Raises:
        StorageError: the store is empty: there is nothing that such a flow could read.
    """
    workspace = Workspace(config)
    catalog.check_not_empty(workspace.store)
    yield workspace
    workspace.trim_cache()


def _begun(workspace: Workspace) -> dict[str, Any]:
    """The configuration that a run must go on with.

    Once policy version 0 is committed, the sections in `_TRIED` must be those that it was made with. Before that, they
    may be any: they are taken from the present configuration. A curriculum holds its problems as soon as it is there.
    """
    begun = dict(manifests.read(workspace.store, layout.run(workspace.name)).settings)
    first = manifests.find(workspace.store, layout.checkpoint(workspace.name, 0))
    planned = first or manifests.find(workspace.store, layout.curriculum(workspace.name))
    present = up_to_date(workspace.config.model_dump(mode="json"))
    for part in _TRIED:
        made = planned if part == "problems" else first
        values = made.settings if made else present
        if part in values:
            begun[part] = values[part]
    return begun


@task(name="start-run", cache_policy=NO_CACHE)
def start_run(workspace: Workspace) -> None:
    """Commit the run's configuration; where the run exists already, refuse another one."""
    from tasks.agents.room import lacking_room

    config, version = workspace.config, layout.run(workspace.name)
    begins = not manifests.committed(workspace.store, version)
    if begins:
        with Draft(workspace.store, version, "run") as draft:
            draft.commit(workspace.provenance(), parents=[])
    _refuse_another(workspace.name, _begun(workspace), config)
    if warning := lacking_room(config):
        get_run_logger().warning(warning)
    state = "begins" if begins else "continues"
    get_run_logger().info("run %s %s in %s", workspace.name, state, workspace.store.uri(f"runs/{workspace.name}"))


def _refuse_another(run: str, begun: dict[str, Any], config: Config) -> None:
    """Raises ConfigError where a run was `begun` with what this program does not know, or with other values."""
    if strange := [line for line in unknown(begun) if not line.startswith(MAY_CHANGE)]:
        raise ConfigError(
            f"run {run!r} was begun by a program with knobs that this one does not know:\n{_listing(strange)}\n"
            "Upgrade this one, or begin another run with run.name=…"
        )
    present = up_to_date(config.model_dump(mode="json"))
    if changed := [line for line in differences(begun, present) if not line.startswith(MAY_CHANGE)]:
        raise ConfigError(
            f"run {run!r} was begun with another configuration:\n{_listing(changed)}\n"
            "Give it back, or begin another run with run.name=…"
        )


def _listing(lines: list[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)
