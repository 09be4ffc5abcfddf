"""What earlier flow runs have played of the data sets that a stream fills."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from storage import layout
from storage.logs.log import Log
from storage.objects.store import Store
from storage.version_names import TrajectoriesVersion
from storage.versions import manifests
from tasks.rollout.data_set import OpenDataSet


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
        return {index: data_set.groups - self.rejected[index] for index, data_set in self.opened.items()}


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
            rejected[index] = data_set.rejected
            for note in data_set.adopted:
                if "group" not in note:
                    note["group"] = number_of(index, note["problem_id"])
            groups = data_set.numbers
        data_set_of |= dict.fromkeys(groups, index)
    following = max([begun, *(number + 1 for number in data_set_of)])
    unplayed = sorted({*later, *range(begun, following)} - data_set_of.keys())
    return Played(data_set_of, unplayed, following, rejected, committed, opened)


def _noted(store: Store, version: TrajectoriesVersion) -> dict[str, Any] | None:
    """Return what a stream noted in the manifest of a data set; None if no stream played it."""
    noted = manifests.read(store, version).metrics.get("stream")
    return noted if isinstance(noted, dict) else None
