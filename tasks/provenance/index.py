"""An index of what was played and trained in a store: catalog and manifests as records, rows as tables of DuckDB.

sets              data_set (number), version
problem_ids       key, problem_id, version: the id that a problem has in a data set or problem set
problem_contents  prompt, solutions, setting (metadata that may count), key (of `tasks.problems.problem_set`): each
                  distinct content
played            one row for each loaded trajectory: data_set, version, trajectory_id, problem_id, sample, key, status,
                  tokens (sampled), fault, cut (the context ended it and the number of missing turns is unknown), oldest
                  (lowest policy version of a sampled token), best (success of the best turn, null without scores),
                  failed (whether a grader failed on a turn, false without scores)
update_inputs     one row for each loaded trajectory and each update over its data set: checkpoint, data_set, version,
                  trajectory_id, key, tokens, entered (whether the update trained on it)

The data sets say what was played. A checkpoint's manifest says which data sets its update had, and by which rules the
update left trajectories out: status, staleness, unknown return, failed verdict, exclusions. With
`train.mask_truncated` a trajectory counts as trained on although all its turns are masked, because its group was
compared with it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

from configs.audit import Audit
from configs.stored import formerly
from storage import layout
from storage import version_names as names
from storage.errors import DamagedError
from storage.grouping import grouped
from storage.logs import catalog
from storage.objects.store import Store, in_parallel
from storage.records import PROBLEM_SCHEMA, SCORE_SCHEMA, TRAJECTORY_SCHEMA, Problem
from storage.version_names import PolicyVersion, select
from storage.versions import manifests
from storage.versions.lineage import scores_of
from storage.versions.manifests import Manifest
from tasks.problems.exclusions import Excluded, read_exclusions
from tasks.problems.problem_set import SETTING_SQL, key
from tasks.tables.db import TrajectoryDb, open_trajectory_db
from tasks.tables.sets import fetch_files
from tasks.train.orders import read_order

_FETCHED_AT_ONCE = 4
_SQL = Path(__file__).with_name("index.sql").read_text("utf-8")
_QUERIES = dict(block.split("\n", 1) for block in _SQL.split("-- name: ")[1:])
"""The queries by their names; those of tables have the names of the tables that they make."""
WARM_START = "warm start"
"""The origin of a policy that an older program taught generated problems, of which no row is stored."""
_FLAGS = ("cut_too", "failed_too", "unfinished_too", "idle")


@dataclass(frozen=True, slots=True)
class Update:
    """A checkpoint and the update that made it.

    Example: Update(checkpoint="runs/demo/checkpoints/000004",
    before=["runs/demo/checkpoints/000003"], data_sets=["runs/demo/trajectories/000003"], exclusions=[])
    """

    checkpoint: PolicyVersion
    before: Sequence[str]  # the checkpoint that the update started from, in this run or in another
    data_sets: Sequence[str]  # trajectories; empty for policy version 0
    exclusions: Sequence[str]  # versions that the update honoured
    allowed: int | None = None  # staleness, beyond which trajectories were left out; None: any
    cut_too: bool = True  # also trained on trajectories whose return only a critic can estimate
    failed_too: bool = True  # also trained on trajectories that graders failed on
    unfinished_too: bool = False  # also trained on trajectories that failed by the policy's fault
    idle: bool = False  # no trajectory was left to train on, and the weights did not change
    selects: bool = False  # trained on chosen rows of its data sets (`flows.fit`)
    origin: str = ""  # of a policy without an earlier checkpoint in the store: where it came from
    problem: str = ""  # why the manifest cannot be read; then only the catalog's entry is known


def _read_update(store: Store, version: PolicyVersion, attempted_parents: Sequence[str]) -> Update | None:
    """Read the manifest of a checkpoint; None if it was never committed."""
    parents, known = attempted_parents, dict[str, Any]()
    try:
        if (manifest := manifests.find(store, version)) is None:
            return None
        known, parents = _rules(manifest), manifest.parent_names
    except DamagedError as error:
        known = {"problem": str(error)}
    return Update(
        checkpoint=version,
        before=select(PolicyVersion, parents),
        data_sets=select(names.TrajectoriesVersion, parents),
        exclusions=select(names.ExclusionsVersion, parents),
        **known,
    )


def _rules(manifest: Manifest) -> dict[str, Any]:
    """Return by which rules an update left trajectories out, and where its policy came from.

    Raises:
        DamagedError: its configuration cannot be read.
    """
    knob, parents = manifest.knob, manifest.parent_names
    selects = layout.SELECTION in {file.name for file in manifest.files}
    begins = not [*select(PolicyVersion, parents), *select(names.TrajectoriesVersion, parents)]
    origin = WARM_START if knob("policy.warm_start") else str(knob("policy.path") or "unknown")
    return {
        "selects": selects,
        "allowed": None if selects else int(manifest.number("rollout.max_head_offpolicyness")),
        "failed_too": not manifest.metrics.get("trajectories/failed_verdict"),
        "cut_too": knob("algorithm.critic") is not None or "trajectories/unknown_return" not in manifest.metrics,
        "unfinished_too": "reward.unfinished" not in formerly(manifest.config),
        "idle": manifest.metrics.get("trajectories") == 0,
        "origin": origin if begins else "",
    }


class TrainingIndex:
    """The index of a store. `opened` opens its tables, `load` fills `played` and `update_inputs`.

    Raises:
        StorageError: the catalog is damaged.
    """

    database: TrajectoryDb

    def __init__(self, store: Store, cache: Path) -> None:
        self.store, self.cache = store, cache
        self.entries = catalog.read_all(store)
        attempts = {each: entry.parents for entry in self.entries for each in select(PolicyVersion, [entry.version])}
        updates = in_parallel(lambda attempt: _read_update(store, *attempt), attempts.items())
        self.updates: dict[str, Update] = {update.checkpoint: update for update in updates if update}
        """All committed checkpoints by version."""
        self.data_sets = list(dict.fromkeys(entry.version for entry in self.entries if entry.kind == "trajectories"))
        """The data sets that were played for training."""
        self.unknown: dict[str, str] = {}
        """Why versions cannot be read."""
        self._parents = {entry.version: entry.parents for entry in self.entries if entry.kind == "trajectories"}

    @cached_property
    def scores(self) -> dict[str, str]:
        """The scores of each data set: those that its update used, or the newest if no update used it."""
        committed = {
            data_set: [each for each in scores if manifests.committed(self.store, each)]
            for data_set, scores in scores_of(self.entries).items()
        }
        return {data_set: scores[-1] for data_set, scores in committed.items() if scores}

    def problem_sets_of(self, data_set: str) -> list[names.ProblemsVersion]:
        """Return the problem sets that the problems of `data_set` were drawn from."""
        return select(names.ProblemsVersion, self._parents.get(data_set, []))

    def descended(self, versions: Iterable[str]) -> set[str]:
        """Return `versions` and all checkpoints that descend from one of them, through any number of runs."""
        children = grouped((parent, update.checkpoint) for update in self.updates.values() for parent in update.before)
        return set(_reached(versions, children))

    def ancestry(self, version: str) -> list[str]:
        """Return `version` and all checkpoints it descends from, nearest first, including those without a manifest."""
        return _reached([version], {update.checkpoint: update.before for update in self.updates.values()})

    @contextmanager
    def opened(self, data_sets: Collection[str] | None = None) -> Iterator[None]:
        """Open the tables `sets`, `problem_ids` and `problem_contents`. They are deleted when the block ends.

        Args:
            data_sets: versions of trajectories; attempts that were never committed are ignored. None: all data sets
                and all problem sets of the store.

        Raises:
            UnavailableError: the store does not answer.
        """
        chosen, problem_sets = data_sets, list[str]()
        if chosen is None:
            chosen, problem_sets = self.data_sets, [each.version for each in self.entries if each.kind == "problems"]
        numbers = {version: number for number, version in enumerate(dict.fromkeys([*chosen, *problem_sets]))}
        trajectories = self._fetch({version: numbers[version] for version in chosen})
        scores = self._fetch({self.scores[each]: numbers[each] for each in chosen if each in self.scores})
        problems = self._fetch({version: numbers[version] for version in problem_sets})
        with open_trajectory_db(Audit().memory_gib) as self.database:
            sets = [(number, version) for version, number in numbers.items()]
            self.database.create("sets", "data_set integer, version varchar", sets)
            self.database.add_view("trajectories", TRAJECTORY_SCHEMA, trajectories)
            self.database.add_view("scores", SCORE_SCHEMA, scores)
            self.database.add_view("problems", PROBLEM_SCHEMA, problems)
            union = "select {columns} from trajectories union select {columns} from problems"
            distinct = self.database.all(union.format(columns=f"prompt, solutions, {SETTING_SQL} as setting"))
            keyed = [(*each, key(Problem("", each[0], each[1], metadata=each[2]))) for each in distinct]
            columns = "prompt varchar, solutions varchar[], setting varchar, key varchar"
            self.database.create("problem_contents", columns, keyed)
            with_ids = union.format(columns=f"problem_id, prompt, solutions, {SETTING_SQL} as setting, data_set")
            _select(self.database, "problem_ids", with_ids=with_ids)
            yield

    def load(self, updates: Collection[Update] | None = None, condition: str = "true", *parameters: Any) -> None:
        """Read the trajectories that fulfil `condition`: SQL on `trajectories t` and `problem_contents a`.

        Record which of them entered which of `updates`, by default of all updates of the store.
        """
        _select(self.database, "played", *parameters, condition=condition, setting=SETTING_SQL)
        # An update may leave out trajectories by status, fault, age, unknown return, failed verdict or exclusion.
        updates, database = self.updates.values() if updates is None else updates, self.database
        rules = attrgetter("allowed", *_FLAGS)
        rows = [(of.checkpoint, name, of.checkpoint.number - 1, *rules(of)) for of in updates for name in of.data_sets]
        flags = ", ".join(f"{flag} boolean" for flag in _FLAGS)
        columns = f"checkpoint varchar, version varchar, trained integer, allowed integer, {flags}"
        database.create("updates", columns, rows)
        honoured = [(update.checkpoint, version) for update in updates for version in update.exclusions]
        database.create("honoured", "checkpoint varchar, exclusions varchar", honoured)
        excluded = dict[str, Excluded]()
        for version in dict.fromkeys(version for _, version in honoured):
            try:
                excluded[version] = read_exclusions(self.store, [version], self.cache)
            except DamagedError as error:  # too many trajectories are then reported as trained on, never too few
                self.unknown[version] = str(error)
        trajectories = [(version, *pair) for version, each in excluded.items() for pair in each.trajectories]
        problems = [(version, name) for version, each in excluded.items() for name in each.problems]
        columns = "exclusions varchar, version varchar, trajectory_id varchar"
        database.create("excluded_trajectories", columns, trajectories)
        database.create("excluded_problems", "exclusions varchar, key varchar", problems)
        database.create("chosen", "checkpoint varchar, row bigint", [*self._chosen(updates)])
        _select(database, "update_inputs")

    def _chosen(self, updates: Iterable[Update]) -> Iterator[tuple[str, int]]:
        """Yield the rows that updates chose."""
        rows = self.database.all("select version, filename, file from trajectories_files join sets using (data_set)")
        files = {(version, Path(name).name): file for version, name, file in rows}
        for update in (each for each in updates if each.selects):
            for part in read_order(self.store, update.checkpoint, self.cache).parts:
                for name, places in (part.rows or {}).items():
                    if (file := files.get((part.trajectories, name))) is not None:
                        yield from ((update.checkpoint, file << 32 | place) for place in places)

    def records(self, query: str, *parameters: Any) -> list[dict[str, Any]]:
        """Return the rows of a query of `index.sql`."""
        return self.database.records(_QUERIES[query], *parameters)

    def versions_with(self, problem: str) -> set[str]:
        """Return the data sets and problem sets that contain the problem with this key."""
        return {version for (version,) in self.database.all("select version from problem_ids where key = ?", problem)}

    def unreadable_data_sets(self, problem: str) -> set[str]:
        """Return the data sets that cannot be read and may contain the problem with this key.

        A data set is left out if all problem sets that it was drawn from are known not to contain the problem.
        """
        versions = self.versions_with(problem) | self.unknown.keys()
        drawn_from = {version: self.problem_sets_of(version) for version in self.unknown if version in self.data_sets}
        return {data_set for data_set, sets in drawn_from.items() if not sets or not versions.isdisjoint(sets)}

    def _fetch(self, versions: Mapping[str, int]) -> list[tuple[int, Path]]:
        """Return the local Parquet files of each readable version, each with the number that the version has.

        Add the reason for each other version to `unknown`. An attempt that was never committed has no files.
        """

        def fetch(version: str) -> list[Path | Exception]:
            try:
                manifest = manifests.find(self.store, version)
                if manifest and self.store.exists(layout.tombstone(version)):
                    return [DamagedError("its data were collected by gc")]
                return [path for _, path in fetch_files(self.store, manifest, self.cache)] if manifest else []
            except DamagedError as error:
                return [error]

        files = list[tuple[int, Path]]()
        for version, found in zip(versions, in_parallel(fetch, versions, _FETCHED_AT_ONCE), strict=True):
            if damage := [str(each) for each in found if isinstance(each, Exception)]:
                self.unknown[version] = "; ".join(damage)
            else:
                files += [(versions[version], each) for each in found if isinstance(each, Path)]
        return files


def _reached(versions: Iterable[str], following: Mapping[str, Sequence[str]]) -> list[str]:
    """Return `versions` and all that follow them at any distance, nearest first."""
    reached = dict.fromkeys(versions)
    for version in (pending := list(reached)):
        for each in following.get(version, ()):
            if each not in reached:
                reached[each] = None
                pending.append(each)
    return list(reached)


def _select(database: TrajectoryDb, table: str, *parameters: Any, **words: object) -> None:
    """Create a table by its query in `index.sql`, into which `words` are put."""
    database.connection.execute(f"create table {table} as {_QUERIES[table].format(**words)}", parameters)
