"""The checkpoints and data sets of a store: which scores, problem sets and exclusions belong to which."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from storage import layout
from storage.errors import DamagedError
from storage.logs import catalog
from storage.objects.store import Store
from storage.version_names import ProblemsVersion, select
from storage.versions import manifests
from tasks.problems.exclusions import Excluded, read_exclusions
from tasks.provenance.played_trajectories import PlayedTrajectories, open_played_trajectories
from tasks.provenance.updates import Update, read_updates


class StoreLineage:
    """The lineage of a store's versions, from its catalog and manifests.

    Raises:
        StorageError: the catalog is damaged.
    """

    def __init__(self, store: Store, cache: Path) -> None:
        self.store, self.cache = store, cache
        self.entries = catalog.read_all(store)
        self.updates = read_updates(store, self.entries)

    @cached_property
    def _parents(self) -> dict[str, list[str]]:
        """The parents of data sets and of their scores, from the last attempt to commit each."""
        kinds = ("trajectories", "scores")
        return {entry.version: entry.parents for entry in self.entries if entry.kind in kinds}

    @cached_property
    def scores(self) -> dict[str, str]:
        """The scores of each data set: those that its update used, or the newest if no update used it."""
        used = {d: u.scores[-1] for u in self.updates.values() if u.scores for d in u.data_sets}
        newest = {
            data_set: version
            for version, parents in self._parents.items()
            for data_set in parents
            if data_set in self._parents and data_set not in used and manifests.committed(self.store, version)
        }
        return newest | used

    @cached_property
    def _data_sets(self) -> dict[str, None]:
        return dict.fromkeys(entry.version for entry in self.entries if entry.kind == "trajectories")

    def problem_sets_of(self, data_set: str) -> list[ProblemsVersion]:
        """Return the problem sets that the problems of `data_set` were drawn from."""
        return select(ProblemsVersion, self._parents.get(data_set, []))

    def data_sets(self, run: str | None = None) -> list[str]:
        """Return the data sets that were played for training, by `run` or, without it, by all runs.

        Raises:
            ValueError: there is no such run.
        """
        versions = self._data_sets
        runs = sorted({name for version in versions if (name := layout.run_of(version))})
        if run and run not in runs:
            names = ", ".join(runs) or "none"
            raise ValueError(f"no run {run!r} has played anything in {self.store.root}; runs there: {names}")
        return [version for version in versions if not run or layout.run_of(version) == run]

    @contextmanager
    def played_trajectories(self, run: str | None = None, *, scored: bool = False) -> Iterator[PlayedTrajectories]:
        """Open all problem sets and the data sets of `run`, or of all runs.

        Problems are searched for only in the data sets and problem sets of `run`, if it is given.

        Raises:
            ValueError: there is no such run.
        """
        data_sets = self.data_sets(run)
        problem_sets = sorted({entry.version for entry in self.entries if entry.kind == "problems"})
        drawn_from = {version for data_set in data_sets for version in self.problem_sets_of(data_set)}
        searched = {*data_sets, *drawn_from} if run else None
        scores = self.scores if scored else {}
        with open_played_trajectories(self.store, data_sets, scores, problem_sets, self.cache, searched) as played:
            yield played

    def add_updates(self, played: PlayedTrajectories, updates: Sequence[Update]) -> None:
        """Record which of the loaded trajectories entered which of `updates`."""
        excluded: dict[str, Excluded] = {}
        for update in updates:
            for version in update.exclusions:
                if version not in excluded:
                    excluded[version] = self._read_exclusions(played, version)
        by_checkpoint = {u.checkpoint: [excluded[version] for version in u.exclusions] for u in updates if u.exclusions}
        played.add_updates(updates, by_checkpoint)

    def _read_exclusions(self, played: PlayedTrajectories, version: str) -> Excluded:
        """Read exclusions; if they cannot be read, note the reason and exclude nothing.

        Then too many trajectories are reported as trained on, never too few.
        """
        try:
            return read_exclusions(self.store, [version], self.cache)
        except DamagedError as error:
            played.unknown[version] = str(error)
            return Excluded()

    def unreadable_data_sets(self, played: PlayedTrajectories, key: str) -> set[str]:
        """Return the data sets that cannot be read and may contain the problem with this key.

        A data set is left out if all problem sets that it was drawn from are known not to contain the problem.
        """
        versions = played.versions_with(key) | played.unknown.keys()
        unreadable = [data_set for data_set in played.unknown if data_set in self._data_sets]
        drawn_from = {data_set: self.problem_sets_of(data_set) for data_set in unreadable}
        return {data_set for data_set, sets in drawn_from.items() if not sets or not versions.isdisjoint(sets)}
