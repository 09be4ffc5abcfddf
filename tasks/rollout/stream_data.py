"""The data sets that a stream fills, and what earlier flow runs have played of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from storage import layout
from storage.logs.log import Log
from storage.objects.store import Store
from storage.records import TRAJECTORY_SCHEMA, Trajectory
from storage.version_names import TrajectoriesVersion
from storage.versions import manifests
from storage.versions.datasets import ShardWriter, adopted
from storage.versions.drafts import Provenance
from storage.versions.journal import JournaledDraft
from tasks.rollout.plan import RolloutPlan
from tasks.rollout.tally import Tally


class OpenDataSet:
    """A data set that a stream fills: a draft with a journal, so that a killed stream keeps its finished shards.

    Args:
        store: the store of the run.
        version: the data set.
        provenance: who writes it, with the lease of the run.
        plan: what all groups share.
        places: groups to come, rejected ones not counted.
        progress: called with lines of text.
    """

    def __init__(
        self,
        store: Store,
        version: TrajectoriesVersion,
        provenance: Provenance,
        plan: RolloutPlan,
        places: int,
        progress: Callable[[str], None],
    ) -> None:
        self.version, self._provenance, self._plan = version, provenance, plan
        self._draft = JournaledDraft(store, version, "trajectories", provenance.fence)
        self.notes: list[dict[str, Any]] = list(self._draft.notes)
        """One for each group: its number, problem, and whether it was rejected."""
        self._tally = Tally(lambda text: progress(f"iteration {version.number}: {text}"))
        self._tally.expect(places, plan.group_size)
        self._tally.resume(adopted(self._draft))
        self._writer = ShardWriter(self._draft, TRAJECTORY_SCHEMA, plan.config.rollout.rows_per_shard)

    @property
    def groups(self) -> list[int]:
        """The numbers of its groups; a spare problem that an older program played has none."""
        return sorted(note["group"] for note in self.notes if note["group"] is not None)

    def add(self, trajectories: Sequence[Trajectory], number: int, *, rejected: bool) -> None:
        """Store a group that finished."""
        rows = [replace(trajectory, iteration=self.version.number) for trajectory in trajectories]
        for row in rows:
            self._tally.add(row)
        note = {"problem_id": rows[0].problem_id, "rejected": rejected, "group": number}
        self._writer.write_group(rows, note)
        self.notes.append(note)
        self._tally.report()

    def commit(self, begun: int, later: Sequence[int], since: float) -> None:
        """Commit the data set.

        Args:
            begun: all groups with smaller numbers have begun.
            later: those among them that are in no data set up to this one.
            since: the time of the monotonic clock from which the speed is measured.

        Raises:
            ValueError: more than `rollout.max_failed_share` of the episodes failed.
        """
        self._writer.flush()
        self._tally.start(since)
        self._tally.report(last=True)
        try:
            self._tally.check(self._plan.config.rollout.max_failed_share)
        except ValueError:
            self._draft.discard()  # the next attempt plays all episodes again
            raise
        metrics = self._tally.metrics(groups_rejected=sum(note["rejected"] for note in self.notes))
        metrics["groups"] = len(self.notes)
        metrics["stream"] = {"groups": self.groups, "begun": begun, "later": list(later)}
        run = self.version.run
        policies = [layout.checkpoint(run, number) for number in sorted(self._tally.policies, reverse=True)]
        self._draft.commit(self._provenance, [*policies, self._plan.problem_set], metrics)

    def keep(self) -> None:
        """Store what is still in memory, so that the next flow run continues with it."""
        self._writer.flush()

    def close(self) -> None:
        """Delete the local files."""
        self._draft.__exit__()


@dataclass(frozen=True, slots=True)
class Played:
    """The state in which a stream finds its data sets when it begins.

    Example: version 3 is to be trained next, with 2 groups in a data set and a staleness of 1. Data set 2 was committed
    when groups 0 to 8 had begun, of which 5, 7 and 8 were in no data set up to 2. The journal of data set 3 holds 7.
    Then groups 5 and 8 are played again, and the next new one is 9:
    Played(data_set_of={7: 3}, unplayed=[5, 8], next=9, rejected={3: 0}, committed=set(), opened={3: …})
    """

    data_set_of: dict[int, int]
    """The data set of each group that is stored, but not trained on."""
    unplayed: list[int]
    """Groups that began, but are in no data set, because their flow run ended before they did."""
    next: int
    """The first group that never began."""
    rejected: dict[int, int]
    """The number of rejected groups in each data set that is not committed."""
    committed: set[int]
    opened: dict[int, OpenDataSet]
    """The data sets that are not committed, but have a journal."""

    @property
    def accepted(self) -> dict[int, int]:
        """The number of groups that are not rejected, in each data set that is not committed."""
        return {index: len(data_set.notes) - self.rejected[index] for index, data_set in self.opened.items()}


def read_played(
    store: Store,
    run: str,
    data_sets: range,
    size: int,
    number_of: Callable[[int, str], int | None],
    opening: Callable[[int], OpenDataSet],
) -> Played:
    """Read what earlier flow runs played.

    Args:
        store: the store of the run.
        run: its name.
        data_sets: those that may hold something: from the first that is not trained on to the last that is in reach.
        size: groups that a draw has.
        number_of: (draw, problem id) -> the number of this group. Programs before the stream stored no numbers, because
            each of their data sets held one draw.
        opening: opens an uncommitted data set.
    """
    before = _noted(store, layout.trajectories(run, data_sets.start - 1)) if data_sets.start else None
    begun, later = (before["begun"], before["later"]) if before else (data_sets.start * size, [])
    data_set_of, rejected, committed = dict[int, int](), dict[int, int](), set[int]()
    opened = dict[int, OpenDataSet]()
    for index in data_sets:
        version = layout.trajectories(run, index)
        groups: Iterable[int] = ()
        if manifests.committed(store, version):
            committed.add(index)
            noted = _noted(store, version)
            groups = noted["groups"] if noted else range(index * size, (index + 1) * size)
        elif Log(store, layout.journal(version)).length():
            data_set = opened[index] = opening(index)
            rejected[index] = sum(note["rejected"] for note in data_set.notes)
            for note in data_set.notes:
                note.setdefault("group", number_of(index, note["problem_id"]))
            groups = data_set.groups
        data_set_of |= dict.fromkeys(groups, index)
    following = max([begun, *(number + 1 for number in data_set_of)])
    unplayed = sorted({*later, *range(begun, following)} - data_set_of.keys())
    return Played(data_set_of, unplayed, following, rejected, committed, opened)


def _noted(store: Store, version: TrajectoriesVersion) -> dict[str, Any] | None:
    """Return what a stream noted in the manifest of a data set; None if no stream played it."""
    noted = manifests.read(store, version).metrics.get("stream")
    return noted if isinstance(noted, dict) else None
