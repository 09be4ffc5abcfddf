"""The checkpoints and data sets of a store, and how they belong together."""

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
from tasks.provenance.plays import Plays, open_plays
from tasks.provenance.updates import Update, read_updates


class Family:
    """As catalog and manifests know them.

    Raises:
        StorageError: the catalog is damaged.
    """

    def __init__(self, store: Store, cache: Path) -> None:
        self.store, self.cache = store, cache
        self.entries = catalog.read_all(store)
        self.updates = read_updates(store, self.entries)

    @cached_property
    def _parents(self) -> dict[str, list[str]]:
        """Of data sets and their scores, as the last attempt had them."""
        kinds = ("trajectories", "scores")
        return {entry.version: entry.parents for entry in self.entries if entry.kind in kinds}

    @cached_property
    def scores(self) -> dict[str, str]:
        """By data set the scores that its update went by; where there was no update, the newest."""
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
        """Those that its problems were drawn from."""
        return select(ProblemsVersion, self._parents.get(data_set, []))

    def data_sets(self, run: str | None = None) -> list[str]:
        """What was played to be trained on, by `run` or by all.

        Raises:
            ValueError: there is no such run.
        """
        found = self._data_sets
        runs = sorted({name for version in found if (name := layout.run_of(version))})
        if run and run not in runs:
            there = ", ".join(runs) or "none"
            raise ValueError(f"no run {run!r} has played anything in {self.store.root}; runs there: {there}")
        return [version for version in found if not run or layout.run_of(version) == run]

    @contextmanager
    def plays(self, run: str | None = None, *, scored: bool = False) -> Iterator[Plays]:
        """All data sets, of `run` or of all, and all problem sets. Problems are looked for in what `run` had.

        Raises:
            ValueError: there is no such run.
        """
        data_sets = self.data_sets(run)
        sets = sorted({entry.version for entry in self.entries if entry.kind == "problems"})
        drawn = {each for data_set in data_sets for each in self.problem_sets_of(data_set)}
        searched = {*data_sets, *drawn} if run else None
        with open_plays(self.store, data_sets, self.scores if scored else {}, sets, self.cache, searched) as plays:
            yield plays

    def use(self, plays: Plays, updates: Sequence[Update]) -> None:
        """Say which of the plays that are loaded entered which of `updates`."""
        known: dict[str, Excluded] = {}
        for update in updates:
            for version in update.exclusions:
                if version not in known:
                    known[version] = self._excluded(plays, version)
        plays.use(updates, {u.checkpoint: [known[each] for each in u.exclusions] for u in updates if u.exclusions})

    def _excluded(self, plays: Plays, version: str) -> Excluded:
        """Nothing, which is noted, where it cannot be read: better too much is said to be trained on."""
        try:
            return read_exclusions(self.store, [version], self.cache)
        except DamagedError as error:
            plays.unknown[version] = str(error)
            return Excluded()

    def unread(self, plays: Plays, key: str) -> set[str]:
        """Data sets that cannot be read, but may have the problem.

        Not those drawn from sets of which it is known that they do not have it.
        """
        holders = plays.holders(key) | plays.unknown.keys()
        sets = {data_set: self.problem_sets_of(data_set) for data_set in plays.unknown if data_set in self._data_sets}
        return {data_set for data_set, drawn in sets.items() if not drawn or not holders.isdisjoint(drawn)}
