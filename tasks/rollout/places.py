"""The bookkeeping of a stream: which groups may begin, and which data set a finished group belongs to.

Policy version i is trained on data set i. A token may be at most `staleness` versions older than the policy that is
trained on it, so a group that begins with policy version v is *due* in data set v + staleness, or in an earlier one.
Every data set has `size` places. A group begins only if a place in time remains for it, and it takes the earliest place
that no other running group needs:

    for every data set j: the running groups that are due in j or earlier <= the free places of the data sets up to j

So the bound holds whatever the groups' lengths. Training waits for a group only when that group is due.

The stream runs no further ahead than training needs, because older tokens teach less: `take` notes how training finds
its data sets. When training has to wait for one, the stream may run one data set further ahead, at most `staleness`.
While the next one is always ready, the stream runs one less ahead, but at least one. So the staleness is near 1 where
training is slower than the rollouts.

Example: size=2, staleness=1. With policy version 0 the groups 0, 1, 2, 3 begin, all due in data set 1. The first two to
finish, say 3 and 0, are data set 0. Version 1 is trained from them; then groups 4 and 5 begin, due in data set 2. If 4
finishes before 1 and 2, it is stored in data set 2, because 1 and 2 need both places of data set 1.
"""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Places:
    """The free places of data sets and the running groups. A group's number identifies it.

    Attributes:
        first: the first data set that is not closed; at the beginning the first that is not yet trained on.
        end: the run has the data sets before this one.
        size: groups of a data set that are not rejected.
        staleness: `rollout.max_head_offpolicyness`.
        most_played: with so many groups, rejected ones included, a data set is closed although places are free.
        accepted: groups that a data set holds; by data set.
        rejected: the same for rejected groups.
        committed: data sets that are committed: nothing in them can be lost. It is the stream's own set, which grows.
    """

    first: int
    end: int
    size: int
    staleness: int
    most_played: int
    accepted: Counter[int] = field(default_factory=Counter)
    rejected: Counter[int] = field(default_factory=Counter)
    committed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._due: dict[int, int] = {}  # by running group
        self._running = Counter[int]()  # groups by the data set in which they are due
        self._ahead = 1  # data sets after the one in training for which groups may begin
        self._plenty = 0  # how often in a row the next data set was waiting, too, when training took one
        self._skip_closed()

    @property
    def running(self) -> int:
        """The number of groups that run."""
        return len(self._due)

    @property
    def complete(self) -> bool:
        """True if all data sets of the run are closed."""
        return self.first == self.end

    def is_closed(self, data_set: int) -> bool:
        """Return whether a data set has all its groups."""
        return data_set in self.committed or self.accepted[data_set] >= self.size or data_set < self.first

    def may_begin(self, version: int) -> bool:
        """Return whether a group may begin with a policy version: training wants it, and a place remains in time."""
        return self.wanted(version) > 0 and self._suffices(self._due_of(version), more=1)

    def wanted(self, version: int) -> int:
        """Return how many more groups training needs that begin with a policy version."""
        if self.complete:
            return 0
        return max(0, self._free_until(min(version + self._ahead, self.end - 1)) - self.running)

    def begin(self, number: int, version: int) -> None:
        """Begin a group with a policy version; `may_begin` must be true."""
        assert self.may_begin(version)
        assert number not in self._due
        due = self._due[number] = self._due_of(version)
        self._running[due] += 1

    def finish(self, number: int, *, rejected: bool) -> int:
        """Return the data set that stores a finished group.

        A rejected group takes no place; it is stored in the first data set that is not closed.
        """
        due, counts = self._end(number), self.rejected if rejected else self.accepted
        data_set = self.first if rejected else next(i for i in range(self.first, due + 1) if self._has_place(i, due))
        counts[data_set] += 1
        self._skip_closed()
        return data_set

    def lose(self, number: int) -> None:
        """Take a group off the running ones. It may begin again, unless its data set has played enough."""
        self._end(number)
        self._skip_closed()

    def _end(self, number: int) -> int:
        """Take a group off the running ones; return the data set in which it was due."""
        due = self._due.pop(number)
        self._running -= Counter([due])  # which leaves out what becomes 0
        return due

    def reopen(self, data_set: int, *, rejected: bool) -> None:
        """Take back the finish of a group that `data_set` should have stored: its place is free again."""
        (self.rejected if rejected else self.accepted)[data_set] -= 1
        self.first = min(self.first, data_set)
        self._skip_closed()

    def take(self, data_set: int) -> None:
        """Note that training asks for a data set, closed or not."""
        waiting = self.is_closed(data_set) and self.is_closed(data_set + 1)
        self._plenty = self._plenty + 1 if waiting else 0
        if not self.is_closed(data_set):
            self._ahead = min(self._ahead + 1, self.staleness)
        elif self._plenty > self._ahead:
            self._ahead, self._plenty = max(self._ahead - 1, 1), 0

    def _due_of(self, version: int) -> int:
        return min(version + self.staleness, self.end - 1)

    def _free(self, data_set: int) -> int:
        return 0 if self.is_closed(data_set) else self.size - self.accepted[data_set]

    def _free_until(self, data_set: int) -> int:
        return sum(map(self._free, range(self.first, data_set + 1)))

    def _running_until(self, data_set: int) -> int:
        """Return how many running groups are due in `data_set` or earlier."""
        return sum(count for due, count in self._running.items() if due <= data_set)

    def _has_place(self, data_set: int, due: int) -> bool:
        """Return whether a finished group may take a place in `data_set` although it is due only in `due`."""
        places = range(data_set, due)
        return self._free(data_set) > 0 and all(self._running_until(j) < self._free_until(j) for j in places)

    def _skip_closed(self) -> None:
        """Set `first` to the first data set that is not closed.

        It is closed, too, if it has played too many groups and no running group needs its places.
        """
        while not self.complete and (
            self.is_closed(self.first) or (self._is_spent and self._suffices(self.first, more=0))
        ):
            self.first += 1

    @property
    def _is_spent(self) -> bool:
        """True if the first data set has played so many groups that no more may begin for it."""
        return self.accepted[self.first] + self.rejected[self.first] >= self.most_played

    def _suffices(self, first_due: int, more: int) -> bool:
        """Return whether the free places suffice for the running groups and `more` that are due in `first_due`.

        The places of a spent data set do not count.
        """
        lost = self._free(self.first) if self._is_spent else 0
        dues = range(first_due, max([first_due, *self._running]) + 1)
        return all(self._running_until(j) + more <= self._free_until(j) - lost for j in dues)
