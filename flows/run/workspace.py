"""A run: its workspace, and how it is begun or continued.

Every stage uses the workspace: configuration, store, cache and lease. A run that exists continues with the
configuration that it was begun with, at its first iteration without a checkpoint, within its budget.
"""

import contextvars
import errno
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE

from configs import Config, ConfigError, differences, up_to_date
from configs.models import WHERE_MODELS_ARE
from configs.storage import Storage
from configs.stored import CHANGES, lost
from configs.train import FROM_NEXT_UPDATE
from storage import errors, layout, version_names
from storage.logs import catalog, leases, log
from storage.maintenance import gc
from storage.objects.store import Store
from storage.processes import folder, limits
from storage.records import Problem
from storage.telemetry.metrics import publish
from storage.versions import checkpoints, datasets, fetch, manifests
from storage.versions.drafts import Draft, Provenance, shards, stage
from tasks.inference.location import identities, model_fingerprints
from tasks.metrics.log import begin_log, catch_up, record
from tasks.metrics.rows import STAGES
from tasks.problems.exclusions import check_exclusions
from tasks.registry import own_code
from tasks.score.scoring import scorer_fingerprint
from tasks.tracking.follow import followed

if TYPE_CHECKING:
    from tasks.inference.beside import BesideModels

MAY_CHANGE = (
    *("run.iterations", "run.max_", "run.when_held", "run.accept_code", "score.workers", "rollout.concurrency"),
    "score.max_failure_share",
    *("storage.", "tracking", "inference.", "cluster.", "retrain.", "audit.", "monitoring."),
    *WHERE_MODELS_ARE,
    *("train.parallel", "train.on_cluster", "train.timeout_s"),
    *("train.startup_timeout_s", "train.state_every", "problems.exclusions", *FROM_NEXT_UPDATE),
)
"""Knobs that may change while a run lasts: they say where and how long it works, not what it computes. Another mesh
(`train.parallel`) computes the same up to rounding. `FROM_NEXT_UPDATE` changes later ones, whose manifests say so."""
_SCORERS = ("score.", "models.judge", "models.reward")
"""Knobs that may differ from the run's when stored trajectories are scored again."""
_LOOKED_AT = 10
"""Number of older checkpoints that an update checks for data to delete. A flow run checks all of them at its start."""
_TRIED = ("problems", "policy", "agent", "environment", "score", "models")
"""Sections that may change until policy version 0 is committed: making it may show that they are unusable, and data of
another program, which has none, may be scored again by other scorers."""


class Workspace:
    """One run's configuration and store. It is a plain class, because Prefect does not traverse plain classes."""

    def __init__(self, config: Config) -> None:
        folder.keep_compiled_code_private()
        self.config = config
        self.store = Store(config.storage.root)
        self.cache = Path(config.storage.cache)
        self.lease: leases.Lease | None = None
        """The right to write the run; a flow holds it while it works. None: not held."""
        self.by_other_scorer = False
        """Whether scores are made by another scorer than the run's, which does not train on them."""
        self.trained: checkpoints.Checkpoint | None = None
        """The newest policy of this flow run, which engines can serve before its checkpoint is committed."""
        self._threads, self._behind = ThreadPoolExecutor(1, "behind"), Future[object]()
        self._behind.set_result(None)
        self.models: BesideModels | None = None
        """The models beside the policy, while the run or its workers are open; None without any."""

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def scorer(self) -> str:
        """The fingerprint of what scores the run's answers, which is in the names of scores."""
        return scorer_fingerprint(self.config.score, model_fingerprints(self.config))

    def provenance(self) -> Provenance:
        """Return the configuration, the user's code, the flow run and the lease, for a manifest."""
        config = self.config.model_dump(mode="json")
        return Provenance(config=config, code=self.code(), prefect_run_id=runtime.flow_run.id, fence=self.lease)

    @contextmanager
    def stage(self, version: version_names.Version) -> Iterator[Draft | None]:
        """Make a version in this block, unless it is committed (`drafts.stage`); then `record` its numbers."""
        with stage(self.store, version, self.lease, self.settle) as draft:
            yield draft
        self.record(version)

    def behind(self, work: Callable[[], object]) -> None:
        """Do some work in a thread while this one goes on, after what is done there already, unless that fails."""
        before = self._behind

        def follow() -> object:
            before.result()
            return work()

        self._behind = self._threads.submit(contextvars.copy_context().run, follow)

    def settle(self, limit_s: float | None = None) -> None:
        """Wait until all work that was put `behind` is done, but not longer than some seconds.

        Raises:
            Exception: the first error of that work.
            TimeoutError: it takes longer.
        """
        self._behind.result(limit_s)

    def code(self) -> dict[str, str]:
        """Return the fingerprints of what is not this program's: the user's code, and models beside the policy."""
        models = {f"models.{role}": identity for role, identity in identities(self.config).items()}
        return own_code(self.config) | models

    def open_checkpoint(self, policy: version_names.PolicyVersion) -> checkpoints.Checkpoint:
        """Return the policy that was trained just now, or open another one: see `checkpoints.open_checkpoint`."""
        if self.trained and self.trained.version == policy:
            return self.trained
        return checkpoints.open_checkpoint(self.store, policy, self.cache)

    def read_problems(self, version: str | None) -> list[Problem]:
        """Read the problems of a stored set; return none if `version` is None."""
        return [Problem(**row) for row in datasets.rows(self.store, version, self.cache)] if version else []

    def record(self, version: version_names.Version) -> None:
        """Write the numbers of a committed version to the run's metrics, if this flow run may write them."""
        may_write = layout.evaluated_policy(version) or (self.lease and version.run == self.name)
        if version.kind in STAGES and may_write and not self.by_other_scorer:
            record(self.store, version)

    def trim_cache(self, *in_use: str) -> None:
        """Delete files from the cache of a remote root until it fits its size; keep the versions `in_use`."""
        fetch.trim_to_limit(self.store, self.config.storage, in_use)

    def collect(self, newest: int = 0) -> None:
        """Delete the data of checkpoints that `storage.keep` does not keep: of all, or of those before `newest`.

        What hinders this does not end the run.
        """
        if (keep := self.config.storage.keep) and self.lease:
            after = max(0, newest - max(keep.last, self.config.train.state_every) - _LOOKED_AT)
            rules = gc.Rules(keep.last, keep.every, ancestors=False, evaluated=True, after=after)
            try:
                gc.collect_run(self.store, self.lease.run, rules, check=self.lease.check)
            except (errors.UnavailableError, errors.DamagedError, OSError) as error:
                get_run_logger().warning("checkpoints that storage.keep does not keep were not deleted: %s", error)

    @property
    def scratch(self) -> Path:
        """The folder for files before they are stored. Opening the run empties it, so a killed flow leaves no files.

        Raises:
            StorageError: the folder cannot be created.
        """
        return fetch.scratch_of(self.cache, self.name)

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
    publish(config.monitoring.prometheus, run.name)
    with leases.Lease(workspace.store, run.name, when_held=run.when_held, label=workspace.label) as workspace.lease:
        yield workspace
        workspace.trim_cache()


@contextmanager
def open_run(config: Config, *, scoring: bool = False) -> Iterator[Workspace]:
    """Open the workspace of a run under its lease, and begin or continue the run.

    With `scoring`, for scores alone, scorer and models may be others than the run's.

    Raises:
        ConfigError: the run was begun with another configuration, or played with other code of the user's; the
            message lists the differences.
        LeaseHeldError: see `open_leased`.
    """
    with open_leased(config) as workspace, telling_full_disks(config.storage):
        shutil.rmtree(workspace.scratch, ignore_errors=True)  # left by a flow that was killed
        start_run(workspace, scoring=scoring)
        with followed(workspace.config), models_of(workspace):
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
    publish(config.monitoring.prometheus, config.run.name)
    with telling_full_disks(config.storage):
        yield workspace
    workspace.trim_cache()


@contextmanager
def telling_full_disks(knobs: Storage) -> Iterator[None]:
    """Raise an error of the block that came from a full disk as StorageError, which says what frees room."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        every = knobs.keep.every if knobs.keep else 1
        gc_command = f"gc --delete --older-than-hours 0 --keep-every {every}"
        raise errors.StorageError(
            f"a disk is full: {error}. A run holds less with a lower storage.keep.last and a higher "
            f"storage.keep.every. `python -m storage --root {shlex.quote(knobs.root)} {gc_command}` frees what no run "
            "needs any more, and what failed attempts left. Then the same command continues"
        ) from error


@contextmanager
def models_of(workspace: Workspace) -> Iterator[None]:
    """Hold servers for the models beside the policy, unless an outer block does. They start when they are needed."""
    if workspace.models or not workspace.config.models.served():
        yield
        return
    from tasks.inference.beside import BesideModels

    try:
        with BesideModels(workspace.config, workspace.cache / "logs" / workspace.name) as workspace.models:
            yield
    finally:
        workspace.models = None


def _fixed_settings(workspace: Workspace, present: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with which a run must continue.

    After the commit of policy version 0, the sections in `_TRIED` must be those of its manifest. Before, they may
    change, so they are taken from the `present` configuration. A committed curriculum fixes `problems` earlier.
    """
    begun = dict(manifests.read(workspace.store, layout.run(workspace.name)).settings)
    first = manifests.find(workspace.store, layout.checkpoint(workspace.name, 0))
    planned = first or manifests.find(workspace.store, layout.curriculum(workspace.name))
    for section in _TRIED:
        manifest = planned if section == "problems" else first
        values = manifest.settings if manifest else present
        if section in values:
            begun[section] = values[section]
    return begun


@task(name="start-run", cache_policy=NO_CACHE)
def start_run(workspace: Workspace, *, scoring: bool = False) -> None:
    """Commit the run's configuration; if the run exists already, refuse a different configuration, or different code.

    With `scoring`, the scorer may be another, and so may the program be that played; `by_other_scorer` then says so.
    """
    with workspace.stage(layout.run(workspace.name)) as draft:
        if begins := draft is not None:
            draft.commit(workspace.provenance(), parents=[])
    present = up_to_date(workspace.config.model_dump(mode="json"))
    begun = _fixed_settings(workspace, present)
    former = lost(manifests.read(workspace.store, layout.run(workspace.name)).config)
    lines = differences(begun, present)
    differs = bool(former) or any(line.startswith(_SCORERS) and not line.startswith(MAY_CHANGE) for line in lines)
    workspace.by_other_scorer = scoring and not begins and differs
    _refuse_another(workspace, begun, present, former)
    if not workspace.by_other_scorer:
        _refuse_other_code(workspace)
    limits.allow_open_files()
    (begin_log if begins else catch_up)(workspace.store, workspace.name)
    state = "begins" if begins else "continues"
    get_run_logger().info("run %s %s in %s", workspace.name, state, workspace.store.uri(f"runs/{workspace.name}"))


def _refuse_another(
    workspace: Workspace, begun: dict[str, Any], present: dict[str, Any], former: Sequence[str]
) -> None:
    """Raise ConfigError if a run was `begun` with other knobs, or with other values.

    `former` are the behaviours that no program has any more. Scores of another scorer, with which no run goes on, may
    be made all the same.
    """
    others = (*_SCORERS, *(change.knob for change in CHANGES if former)) if workspace.by_other_scorer else ()
    for what, lines, remedy in (
        ("by an older program, with settings that this one lacks", former, "To go on with those of this one, "),
        ("with another configuration", differences(begun, present), "Restore it (of a newer program: upgrade), or "),
    ):
        fixed = [line for line in lines if not line.startswith((*MAY_CHANGE, *others))]
        if listing := "\n".join(f"  {line}" for line in fixed):
            raise ConfigError(f"run {workspace.name!r} was begun {what}:\n{listing}\n{remedy}{_remedy(workspace)}")


def _remedy(workspace: Workspace) -> str:
    """Return how to go on with other settings: in another run or, after the first update, in a fork."""
    name, number = workspace.name, committed_updates(workspace)
    if not number:
        return "begin another run with run.name=…"
    return (
        "begin another run with run.name=…, or a fork, which goes on from the newest checkpoint with its optimizer:\n"
        f"  the same command with --fork {name}@{number} run.name={name}-fork\n"
        f"  (of a deployment: the overrides policy.fork={name}@{number} and run.name={name}-fork)"
    )


def _refuse_other_code(workspace: Workspace) -> None:
    """Raise ConfigError if the run was last played with other code of the user's and `run.accept_code` is false.

    The newest data set says with which, or the newest checkpoint if the run is trained from the store alone. Before the
    first one, code may change, unless episodes of it are stored.
    """
    store, name, number = workspace.store, workspace.name, committed_updates(workspace)
    played = [layout.trajectories(name, iteration) for iteration in range(number, max(number - 2, -1), -1)]
    versions = [layout.checkpoint(name, number)] if number and workspace.config.fit.data else played
    newest = next(filter(None, (manifests.find(store, version) for version in versions)), None)
    if newest is None and shards(store, layout.trajectories(name, 0)):
        newest = manifests.find(store, layout.checkpoint(name, 0))
    if newest is None or not newest.code:
        return
    if changed := {path for path, _ in newest.code.items() ^ workspace.code().items()}:
        files = ", ".join(sorted(changed))
        done = "trained" if workspace.config.fit.data else "played"
        found = f"run {name!r} was {done} with other code or models of yours ({newest.version}): {files}"
        if not workspace.config.run.accept_code:
            raise ConfigError(
                f"{found}\nRestore it; continue with what is there now by run.accept_code=true, which "
                f"all that is made from now on will name; or {_remedy(workspace)}"
            )
        get_run_logger().warning("%s. It goes on with what is there now (run.accept_code)", found)


def finished_iterations(workspace: Workspace) -> int:
    """Count the completed iterations, up to `run.iterations`, which `flows.fit` knows once its updates are planned."""
    return min(committed_updates(workspace), workspace.config.run.iterations)


def committed_updates(workspace: Workspace) -> int:
    """Count the updates of a run by the names of their checkpoints."""
    store, name = workspace.store, workspace.name
    return log.first_free(lambda number: manifests.committed(store, layout.checkpoint(name, number + 1)))
