"""The ledger of a rollout that many workers share: which of them hold finished groups, and what is stored."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from storage.versions.drafts import Shard
from tasks.rollout.outcomes import FinishedGroup
from tasks.rollout.play import OpenDataSet, SharedGroups
from tasks.rollout.remote.messages import Destination, Orders, StoredShard, StoreOrder

if TYPE_CHECKING:
    from tasks.rollout.remote.jobs import Attended


@dataclass(frozen=True, slots=True)
class Events:
    """What a worker has reported; `lost` has the numbers of the groups that it played, if the worker is lost."""

    worker: "Attended"
    finished: Sequence[FinishedGroup] = ()
    stored: Sequence[StoredShard] = ()
    lost: set[int] | None = None


@dataclass(slots=True)
class Ledger:
    """The finished groups of the rollout with a number and the workers that hold them; used by one thread at a time."""

    rollout: int
    groups: SharedGroups
    holders: "dict[OpenDataSet, dict[Attended, set[int]]]" = field(default_factory=dict)
    flushing: "set[tuple[OpenDataSet, Attended]]" = field(default_factory=set)
    """Workers that were told to flush, and got nothing more to store since."""

    def enter(self, events: Sequence[Events]) -> "dict[Attended, Orders]":
        """Enter what workers have reported, commit what is complete, and return the orders that follow."""
        orders: dict[Attended, Orders] = defaultdict(Orders)
        shards: dict[OpenDataSet, list[StoredShard]] = defaultdict(list)
        for each in events:
            if each.lost is not None:
                self._lose(each.worker, each.lost)
            for finished in each.finished:
                data_set = self._finish(each.worker, finished)
                order = StoreOrder(self.rollout, finished.number, _destination(data_set))
                orders[each.worker].store.append(order)
            for shard in each.stored:
                data_set = self._data_set_of(shard)
                self.holders[data_set][each.worker].difference_update(shard.numbers)
                shards[data_set].append(shard)
        for data_set, stored in shards.items():
            self._accept(data_set, stored)
        self.groups.settle()
        for data_set in self.groups.unstored():
            for worker in self._to_flush(data_set):
                orders[worker].flush.append(_destination(data_set))
        return orders

    def _finish(self, worker: "Attended", finished: FinishedGroup) -> OpenDataSet:
        data_set = self.groups.enter(finished, pending=True)
        self.holders.setdefault(data_set, {}).setdefault(worker, set()).add(finished.number)
        self.flushing.discard((data_set, worker))
        return data_set

    def _lose(self, worker: "Attended", playing: set[int]) -> None:
        held = [holders.pop(worker, set()) for holders in self.holders.values()]
        for number in sorted(playing.union(*held)):
            self.groups.lose(number)

    def _data_set_of(self, shard: StoredShard) -> OpenDataSet:
        return next(each for each in self.holders if shard.file.path.startswith(f"{each.draft.version}/"))

    def _accept(self, data_set: OpenDataSet, stored: Sequence[StoredShard]) -> None:
        numbers = [number for shard in stored for number in shard.numbers]
        notes = {number: data_set.note(data_set.entered[number]) for number in numbers}
        data_set.accept([Shard(shard.file, [notes[n] for n in shard.numbers]) for shard in stored], numbers)
        if not any(self.holders[data_set].values()):
            del self.holders[data_set]

    def _to_flush(self, data_set: OpenDataSet) -> "list[Attended]":
        """Return the workers that still hold groups of a data set, and were not told to flush them."""
        holding = [worker for worker, numbers in self.holders.get(data_set, {}).items() if numbers]
        told = [worker for worker in holding if (data_set, worker) not in self.flushing]
        self.flushing.update((data_set, worker) for worker in told)
        return told


def _destination(data_set: OpenDataSet) -> Destination:
    draft = data_set.draft
    return Destination(draft.version, draft.kind, data_set.iteration)
