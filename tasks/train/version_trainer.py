"""A trainer of versions: it reads policy, trajectories and scores from the store, and writes the next policy there.

Its orders are names of versions. It never commits: the caller, who holds the lease of the run, does.
"""

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from configs import Config
from configs.loader import read_stored
from storage import layout
from storage.errors import first_few
from storage.objects.store import Store
from storage.processes.folder import TemporaryFolder
from storage.records import Score, Trajectory, to_score, to_trajectory
from storage.version_names import PolicyVersion
from storage.versions import checkpoints, datasets
from storage.versions.checkpoints import Canary, Checkpoint
from storage.versions.drafts import Draft, new_nonce
from storage.versions.fetch import WEIGHTS, fetch, fetch_all, scratch_of, trim_to_limit
from storage.versions.manifests import File, read
from storage.versions.model_files import INDEX
from tasks.problems.exclusions import read_exclusions, set_aside
from tasks.train.mesh import ALONE, Mesh
from tasks.train.orders import DistanceOrder, Made, Part, Progress, Updated, UpdateOrder, add_selection, read_order
from tasks.train.train_state import load_train_state, save_rest, save_weights
from tasks.train.trainer import Trainer

_SAME = 1e-3
"""Largest difference of a canary's logprobs at which a policy that was made again counts as the stored one."""
_MOST_CLIPPED = 0.05
"""Share of the first tokens of a run that may be clipped by rounding alone."""
_NAMED = 20
"""Number of excluded trajectories that the log names."""


@dataclass(frozen=True, slots=True)
class _Unwritten:
    """A new policy in memory, whose files are not in the store yet."""

    order: UpdateOrder
    nonce: str
    weights: Path  # folder of them, or of the adapter
    canary: Canary


class VersionTrainer:
    """Carries out orders. It keeps the policy in memory between them.

    Args:
        config: the run's configuration.
        mesh: the ranks that carry out the same orders, each with a trainer of versions.
        hands_over: whether an engine may read new weights before they are stored, from the folder of this one rank.
    """

    def __init__(self, config: Config, mesh: Mesh = ALONE, *, hands_over: bool = True) -> None:
        self._config, self._mesh, self._hands_over = config, mesh, hands_over
        self._kept: tuple[PolicyVersion | None, Trainer | None] = None, None  # in memory, with a committed train state
        self._unwritten: _Unwritten | None = None
        self._folders: list[TemporaryFolder] = []
        """The folders with the weights of the newest policy and of the one before."""
        self._store, self._cache = Store(config.storage.root), Path(config.storage.cache)
        self._version_0, teacher = layout.checkpoint(config.run.name, 0), config.models.teacher
        self._teacher = layout.checkpoint_of(teacher.checkpoint) if teacher and teacher.checkpoint else None

    def update(self, order: UpdateOrder, progress: Progress, nonce: str | None = None) -> Updated:
        """Run one update, and put the weights of the new policy into a folder, from which an engine can read them.

        Args:
            order: the update.
            progress: called with a line of text after each part.
            nonce: of the draft that `write` makes, which several ranks share; None: a new one.

        Raises:
            ValueError: see `Trainer.update`.
            StorageError: a version is missing or damaged.
        """
        trainer = self._in_memory(order.policy) or self._load(order.policy, progress)
        metrics = self._train(trainer, order, progress)
        if order.policy.number == 0 and not order.selects:
            check_noise(metrics, self._config.algorithm.type)
        for older in self._folders[:-1]:  # an engine may still read the last one
            older.remove()
        folder = TemporaryFolder(str(scratch_of_rank(self._config, self._mesh.rank)))
        self._folders = [*self._folders[-1:], folder]
        weights, policy = folder.path / "model", None
        save_weights(trainer.state, weights)
        made = self._unwritten = _Unwritten(order, nonce or new_nonce(), weights, trainer.canary())
        if self._mesh.rank == 0 and not self._config.policy.lora:
            self._copy_tokenizer(order.policy, weights)
        if self._hands_over:
            policy = self._as_checkpoint(made)
        self._kept = order.version, trainer
        return Updated(metrics, policy)

    def write(self) -> Made:
        """Write the files of the policy that the last `update` made into a draft; several ranks write their own."""
        (made, self._unwritten), (_, trainer) = (self._unwritten, None), self._kept
        assert made
        assert trainer
        order, every, last = made.order, self._config.train.state_every, self._config.run.iterations
        scratch = TemporaryFolder(str(scratch_of_rank(self._config, self._mesh.rank)))
        with Draft(self._store, order.version, "checkpoint", made.nonce) as draft, scratch as state:
            if self._mesh.rank == 0:
                checkpoints.add_canary(draft, made.canary)
                if order.selects:
                    add_selection(draft, order)
            draft.add_folder(made.weights, "adapter" if self._config.policy.lora else "model")
            if order.version.number % every == 0 or order.version.number == last:
                save_rest(trainer.state, state)
                draft.add_folder(state, "state")
            draft.hand_over(self._cache)
        if not self._hands_over:
            self._folders.pop().remove()
        if self._mesh.rank == self._mesh.neighbours[0]:  # one rank of each node
            in_use = [self._version_0, order.policy, order.version, *([self._teacher] if self._teacher else [])]
            trim_to_limit(self._store, self._config.storage, in_use)
        return Made(draft.nonce, draft.files)

    @cached_property
    def _base(self) -> Checkpoint:
        """The version whose weights an adapter changes, read once."""
        return self._open(self._version_0)

    def _as_checkpoint(self, made: "_Unwritten") -> Checkpoint:
        """Return a new policy as an engine of this host can serve it."""
        version, base = made.order.version, None
        model, adapter = made.weights, None
        if self._config.policy.lora:
            model, adapter, base = self._base.model, made.weights, self._base.of_model
        return Checkpoint(
            version=version,
            number=version.number,
            model=model,
            state=None,
            canary=made.canary,
            attempt=made.nonce,
            committed=None,
            adapter=adapter,
            base=base,
        )

    def make_again(self, order: UpdateOrder, before: Path, made: Path) -> None:
        """Run an update whose checkpoint exists; write model/ and state/ of before and after it to two folders."""
        kept = None if self._is_whole(order.policy) else self._in_memory(order.policy)
        trainer = kept or self._load(order.policy)
        trainer.save(before / "model", before / "state")
        self._train(trainer, order)
        trainer.save(made / "model", made / "state")
        self._kept = order.version, trainer

    def _in_memory(self, policy: PolicyVersion) -> Trainer | None:
        """Return the trainer that is in memory, if it has this version; forget it otherwise."""
        if self._kept[0] != policy:
            self._kept = None, None
        return self._kept[1]

    def _is_whole(self, version: PolicyVersion) -> bool:
        """Return whether the store still has the weights and the train state of a checkpoint."""
        gone = (layout.tombstone(version, state=state) for state in (False, True))
        return bool(read(self._store, version).names_in("state")) and not any(map(self._store.exists, gone))

    def _load(self, policy: PolicyVersion, progress: Progress = lambda _: None) -> Trainer:
        """Load a policy with its train state; make the state again if it was not kept (`train.state_every`).

        Each update is made again by the settings that it was made by.

        Raises:
            ValueError: the same updates now make another policy.
        """
        checkpoint, orders = self._open(policy, state=True), list[UpdateOrder]()
        canary = checkpoint.canary
        while checkpoint.state is None and checkpoint.number:
            orders.append(read_order(self._store, checkpoint.version, self._cache))
            checkpoint = self._open(orders[-1].policy, state=True)
        version_0 = self._open(self._version_0).model if self._config.algorithm.needs_first else None
        taught_by = self._open(self._teacher) if self._teacher else None
        teacher = (taught_by.model, taught_by.adapter) if taught_by else None
        folders = checkpoint.model, checkpoint.state, version_0, checkpoint.adapter, teacher
        trainer = Trainer(load_train_state(self._config, *folders, self._mesh))
        for order in reversed(orders):
            progress(f"{order.version} was kept without its train state: making it again from the stored data")
            trainer.state.reconfigure(self._settings_of(order.version))
            self._train(trainer, order)
        trainer.state.reconfigure(self._config)
        both = zip(trainer.canary().logprobs, canary.logprobs, strict=False) if orders else ()  # older ones are longer
        difference = max((abs(now - then) for now, then in both), default=0.0)
        if difference > _SAME:
            raise ValueError(
                f"the updates since {checkpoint.version}, made again, give another policy than {policy}: logprobs of "
                f"its canary differ by {difference:.2g}. Have optimizer or algorithm changed since? Begin a fork there "
                f"with --fork {checkpoint.version.run}@{checkpoint.number} run.name=…"
            )
        return trainer

    def _settings_of(self, version: PolicyVersion) -> Config:
        """Return the configuration that made a version, for this store and these ranks."""
        stored = read_stored(read(self._store, version).settings, version)
        return stored.model_copy(update={"storage": self._config.storage, "train": self._config.train})

    def _train(self, trainer: Trainer, order: UpdateOrder, progress: Progress = lambda _: None) -> dict[str, Any]:
        """Update the trainer's policy as an order says; return the metrics."""
        started = time.perf_counter()
        rows, scores, metrics = self._data(order, trainer.state.config.problems.exclusions, progress)
        rows, taught = self._taught(order, rows, progress)
        metrics["time/read"] = time.perf_counter() - started
        self._kept = None, None  # from now on it has no committed version
        given = rows, scores, order.policy.number, progress
        return metrics | trainer.update(*given, chosen=order.selects, taught=taught)

    def distance(self, order: DistanceOrder) -> float | None:
        """Compute the mean KL in nats per token between two policies; None if no token is trainable."""
        rows, scores = self._rows(Part(order.trajectories, order.scores))
        trainer = self._in_memory(order.policy)
        if not trainer:  # it is not kept: an update would need the optimizer's state, too
            policy = self._open(order.policy)
            trainer = Trainer(load_train_state(self._config, policy.model, adapter=policy.adapter, mesh=self._mesh))
        other = self._open(order.other)
        return trainer.distance(other.model, rows, scores, other.adapter)

    def _open(self, version: PolicyVersion, *, state: bool = False) -> Checkpoint:
        return checkpoints.open_checkpoint(self._store, version, self._cache, state=state, fetching=self._fetch)

    def _fetch(self, store: Store, files: Sequence[File], folder: Path) -> None:
        """Fetch and verify files together with the other ranks of this node, each of which fetches some."""
        fetch_all(store, [files[index] for index in self._mesh.assigned([file.bytes for file in files])], folder)
        self._mesh.wait()

    def _data(
        self, order: UpdateOrder, versions: Sequence[str], progress: Progress
    ) -> tuple[list[Trajectory], list[Score], dict[str, float]]:
        """Read the rows of an update and their scores; set aside what versions of exclusions exclude, and count it."""
        rows, scores, excluded = list[Trajectory](), list[Score](), 0
        for number, part in enumerate(order.parts):
            kept, of_scores = self._rows(part)
            if versions:
                kept, ids = set_aside(kept, part.trajectories, read_exclusions(self._store, versions, self._cache))
                excluded += len(ids)
                if ids:
                    named = first_few(ids, _NAMED)
                    progress(f"{len(ids)} trajectories are excluded by {', '.join(versions)}: {named}")
            if order.selects:  # the ids of imported data sets are unique within each only
                kept = [replace(row, trajectory_id=f"{number}/{row.trajectory_id}") for row in kept]
                of_scores = [replace(score, trajectory_id=f"{number}/{score.trajectory_id}") for score in of_scores]
                kept = [replace(row, problem_id=f"{number}/{row.problem_id}") for row in map(_as_sampled, kept)]
            rows += kept
            scores += of_scores
        return rows, scores, {"trajectories/excluded": float(excluded)} if versions else {}

    def _taught(
        self, order: UpdateOrder, rows: list[Trajectory], progress: Progress
    ) -> tuple[list[Trajectory], dict[str, list[float]]]:
        """Return the rows for which a served teacher gave logprobs, and these by trajectory; without one all rows."""
        columns, versions = ["trajectory_id", "logprobs", "problem"], [part.teacher for part in order.parts]
        of_parts = (datasets.rows(self._store, each, self._cache, columns) for each in versions if each)
        answers = {row["trajectory_id"]: row for of_part in of_parts for row in of_part}
        if unread := {name for name, row in answers.items() if row["problem"]}:
            progress(f"{len(unread)} trajectories left out: the teacher's answer could not be read")
            rows = [row for row in rows if row.trajectory_id not in unread]
        return rows, {name: row["logprobs"] for name, row in answers.items()}

    def _rows(self, part: Part) -> tuple[list[Trajectory], list[Score]]:
        if part.rows is None:
            rows = list(datasets.trajectories(self._store, part.trajectories, self._cache))
            return rows, [to_score(row) for row in datasets.rows(self._store, part.scores, self._cache)]
        store, cache = self._store, self._cache
        chosen = (datasets.rows_at(store, part.trajectories, *places, cache) for places in part.rows.items())
        rows = [*map(to_trajectory, chain.from_iterable(chosen))]
        ids = [row.trajectory_id for row in rows]
        found = (datasets.rows_with(store, part.scores, name, "trajectory_id", ids, cache) for name in part.score_files)
        return rows, [*map(to_score, chain.from_iterable(found))]

    def _copy_tokenizer(self, policy: PolicyVersion, model: Path) -> None:
        """Copy from a checkpoint the files that the trainer does not write: tokenizer and chat template."""
        manifest = read(self._store, policy)
        for file in manifest.files:
            name = file.name.removeprefix("model/")
            target = model / name
            if name != file.name and not name.endswith((*WEIGHTS, INDEX)) and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(fetch(self._store, manifest, file.name, self._cache), target)


def _as_sampled(row: Trajectory) -> Trajectory:
    """Fill in the logprobs and versions that imported rows lack; what needs them does not get such rows."""
    logprobs = [0.0 if value is None else value for value in row.logprobs or [0.0] * len(row.token_ids)]
    versions = [0 if value is None else value for value in row.versions or [0] * len(row.token_ids)]
    return replace(row, logprobs=logprobs, versions=versions)


def check_noise(metrics: Mapping[str, float], algorithm: str) -> None:
    """Check the first update of a run: its first minibatch has the weights that sampled, so only rounding is clipped.

    Raises:
        ValueError: the limits of the algorithm's ratios clip it, because they are to the engine's logprobs.
    """
    if (clipped := metrics.get("policy/first_clip_fraction", 0.0)) > _MOST_CLIPPED:
        of_token, of_sequence = metrics["proximal/mean_difference"], metrics["proximal/sequence_difference"]
        share = f"{clipped:.0%} of the first minibatch, whose weights are those that sampled: its limits are below the"
        noise = f"noise of the engine's logprobs, {of_token:.2g} a token and {of_sequence:.2g} a trajectory"
        remedy = "Raise them, or take ratios to recomputed logprobs (ppo: objective)"
        raise ValueError(f"algorithm.type={algorithm} clips {share} {noise}. {remedy}")


def scratch_of_rank(config: Config, rank: int) -> Path:
    """Return the folder for files of a rank before they are stored; the nodes may share a cache."""
    return scratch_of(Path(config.storage.cache), f"{config.run.name}/rank-{rank}")
