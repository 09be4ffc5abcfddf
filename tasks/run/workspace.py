"""A run: its workspace, how it is begun or continued, and its progress.

Every stage uses the workspace: configuration, store, cache and lease. A run that exists continues with the
configuration that it was begun with, at its first iteration without a checkpoint, within its budget.
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from uuid import UUID

from prefect import get_run_logger, runtime, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE

from configs import Config, ConfigError, as_begun, differences, unknown, up_to_date
from storage import layout
from storage.logs import catalog
from storage.logs.leases import Lease
from storage.logs.log import first_free
from storage.objects.store import Store, in_parallel
from storage.processes.folder import keep_compiled_code_private
from storage.version_names import PolicyVersion
from storage.versions import aliases, checkpoints, manifests
from storage.versions.checkpoints import Checkpoint
from storage.versions.drafts import Draft, Provenance
from storage.versions.fetch import scratch_of, trim_to_limit
from storage.visible import Fleeting
from tasks.agents.problem_checks import lacking_room
from tasks.metrics.line import iteration_line
from tasks.metrics.log import MetricsLog
from tasks.problems.exclusions import check_exclusions
from tasks.tracking.follow import followed

MAY_CHANGE = (
    "run.iterations",
    "run.max_",
    "run.when_held",
    "storage.",
    "tracking",
    "cost.",
    "inference.",
    "trainer.",
    "cluster.",
    "ppo.parallel",
    "retrain.",
    "audit.",
    "problems.exclusions",
    "score.workers",
    "rollout.concurrency",
)
"""Knobs that may change while a run lasts: they say where and how long it works, not what it computes. Another mesh
(`ppo.parallel`) computes the same up to rounding."""
_RECENT = 10
"""Iterations from whose median duration the time left is expected."""
_TRIED = ("problems", "policy", "agent", "environment")
"""Sections that may change until policy version 0 is committed, since making it may show that they are unusable."""


class Workspace:
    """One run's configuration and store. It is a plain class, because Prefect does not traverse plain classes."""

    def __init__(self, config: Config) -> None:
        keep_compiled_code_private()
        self.config = config
        self.store = Store.of(config.storage)
        self.cache = Path(config.storage.cache)
        self.lease: Lease | None = None
        """The right to write the run; a flow holds it while it works. None: not held."""
        self.metrics = MetricsLog(self.store, config.run.name)

    @property
    def name(self) -> str:
        return self.config.run.name

    def provenance(self) -> Provenance:
        """Return the configuration, the flow run and the lease, for a manifest."""
        config = self.config.model_dump(mode="json")
        return Provenance(config=config, prefect_run_id=runtime.flow_run.id, fence=self.lease)

    def open_checkpoint(self, policy: PolicyVersion) -> Checkpoint:
        """See `checkpoints.open_checkpoint`."""
        return checkpoints.open_checkpoint(self.store, policy, self.cache)

    def record(self, version: str) -> None:
        """Write the numbers of a committed version to the run's metrics, if this flow run may write them."""
        if self.lease and layout.run_of(version) == self.name:
            self.metrics.record(version)

    def trim_cache(self, *in_use: str) -> None:
        """Delete files from the cache of a remote root until it fits its size; keep the versions `in_use`."""
        trim_to_limit(self.store, self.config.storage, in_use)

    @property
    def scratch(self) -> Path:
        """The folder for files before they are stored. Opening the run empties it, so a killed flow leaves no files.

        Raises:
            StorageError: the folder cannot be created.
        """
        return scratch_of(self.cache, self.name)

    @property
    def label(self) -> str:
        """The name of the flow run, for messages; empty outside of a flow run."""
        name = runtime.flow_run.name
        return f"flow run {name}" if name else ""


@contextmanager
def open_leased(config: Config) -> Iterator[Workspace]:
    """Open the workspace of a run, or of a retraining, and hold its lease until the block ends.

    Raises:
        LeaseHeldError: another flow run holds the lease, and `run.when_held` is `stop`; the message names the holder.
        StorageError: `problems.exclusions` names something that is no version of exclusions; the message says what to
            do.
    """
    workspace, run = Workspace(config), config.run
    check_exclusions(workspace.store, config.problems.exclusions)
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
        with followed(workspace.config):
            yield workspace


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
    config = as_begun(workspace.config, begun)
    tokens = begun.get("ppo", {}).get("micro_batch_tokens")  # another number would change the last bits of the weights
    if config.ppo.micro_batch_tokens is None and isinstance(tokens, int):
        config = config.model_copy(update={"ppo": config.ppo.model_copy(update={"micro_batch_tokens": tokens})})
    workspace.config = config
    _refuse_another(workspace.name, begun, workspace.config)
    if warning := lacking_room(workspace.config):
        get_run_logger().warning(warning)
    if not begins:
        workspace.metrics.catch_up()
    state = "begins" if begins else "continues"
    get_run_logger().info("run %s %s in %s", workspace.name, state, workspace.store.uri(f"runs/{workspace.name}"))


def _refuse_another(run: str, begun: dict[str, Any], config: Config) -> None:
    """Raise ConfigError if a run was `begun` with knobs that this program does not know, or with other values."""
    if listing := "\n".join(f"  {line}" for line in unknown(begun) if not line.startswith(MAY_CHANGE)):
        raise ConfigError(
            f"run {run!r} was begun by a program with knobs that this one does not know:\n{listing}\n"
            "Upgrade this one if a newer program began it, or begin another run with run.name=…"
        )
    present = up_to_date(config.model_dump(mode="json"))
    if listing := "\n".join(f"  {line}" for line in differences(begun, present) if not line.startswith(MAY_CHANGE)):
        raise ConfigError(
            f"run {run!r} was begun with another configuration:\n{listing}\n"
            "Restore it, or begin another run with run.name=…"
        )


def newest_policy(workspace: Workspace) -> PolicyVersion | None:
    """Return the newest checkpoint of at most `run.iterations` updates; None before the first update.

    Move the run's alias there, in case its writer died before it could.
    """
    number = _finished_iterations(workspace)
    if not number:
        return None
    policy = layout.checkpoint(workspace.name, number)
    aliases.advance(workspace.store, layout.latest(workspace.name), policy, workspace.label)
    return policy


def iterations(workspace: Workspace) -> Iterator[int]:
    """Iterate over the iterations without a checkpoint, within the run's budget; update the progress artifact.

    The tokens of the budget count over the whole run, its minutes over this flow run only.
    """
    run, first, started = workspace.config.run, _finished_iterations(workspace), time.monotonic()
    artifact = create_progress_artifact(progress=0.0, key="iterations", description=f"{run.iterations} iterations")
    assert isinstance(artifact, UUID)
    seconds = list[float]()
    get_run_logger().info(Fleeting("the first iteration begins"), extra={"iterations": (first, run.iterations)})

    def tokens(iteration: int) -> int:
        rollout = manifests.read(workspace.store, layout.trajectories(workspace.name, iteration))
        return int(rollout.metrics["generated_tokens"])

    spent = sum(in_parallel(tokens, range(first if run.max_tokens else 0)))
    for iteration in range(first, run.iterations):
        minutes = (time.monotonic() - started) / 60
        for name, limit, used in (("max_tokens", run.max_tokens, spent), ("max_minutes", run.max_minutes, minutes)):
            if limit and used >= limit:
                text = "run.%s=%g is spent: the run ends with %d iterations"
                get_run_logger().info(text, name, limit, iteration, extra={"iterations": (iteration, iteration)})
                return
        begun = time.monotonic()
        yield iteration
        seconds.append(time.monotonic() - begun)
        spent += tokens(iteration) if run.max_tokens else 0
        left_s = median(seconds[-_RECENT:]) * (run.iterations - iteration - 1)
        line = iteration_line(workspace.metrics.iteration(iteration), run.iterations, left_s)
        get_run_logger().info(line, extra={"iterations": (iteration + 1, run.iterations)})
        update_progress_artifact(artifact_id=artifact, progress=100 * (iteration + 1) / run.iterations)


def _finished_iterations(workspace: Workspace) -> int:
    """Count the completed iterations by the names of their checkpoints."""

    def has_update(number: int) -> bool:
        return manifests.committed(workspace.store, layout.checkpoint(workspace.name, number + 1))

    return min(first_free(has_update), workspace.config.run.iterations)
