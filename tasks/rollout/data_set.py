"""The data set that a rollout fills, until it is committed."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from configs import Config
from storage.records import TRAJECTORY_SCHEMA, Trajectory
from storage.versions.datasets import ShardWriter, adopted
from storage.versions.drafts import Draft, Shard
from tasks.rollout.plan import Group
from tasks.rollout.selection import is_rejected
from tasks.rollout.tally import Counts, Tally, counts_of
from tasks.score.environment import SuccessRule


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """The result of a finished group, without its trajectories."""

    number: int
    problem_id: str
    rejected: bool
    counts: Counts

    @classmethod
    def of(cls, group: Group, played: Sequence[Trajectory], selected: Sequence[Trajectory], config: Config) -> Self:
        """Sum up a group: all trajectories that were `played`, and the same as they are stored, after the selection."""
        counts = counts_of(selected, SuccessRule.while_playing(config.score))
        return cls(group.number, group.problem.problem_id, is_rejected(played, selected, config), counts)


class OpenDataSet:
    """A data set while its groups are played: a draft, which may have a journal, and the counts for its manifest.

    The journal has a note for each group: its problem and whether it was rejected; in a stream also its number.

    Args:
        draft: keeps the shards; the trajectories that it took over from a killed attempt are counted.
        iteration: the iteration whose number the trajectories get.
        config: of the run.
        progress: called with lines of text.
        numbered: whether a group's number means something to later flow runs.
    """

    def __init__(
        self,
        draft: Draft,
        iteration: int,
        config: Config,
        progress: Callable[[str], None],
        *,
        numbered: bool = False,
    ) -> None:
        self.draft, self.iteration = draft, iteration
        self.tally = Tally(progress, SuccessRule.while_playing(config.score))
        self.tally.resume(adopted(draft))
        self.adopted: list[dict[str, Any]] = list(draft.notes)
        """The notes of the groups in shards that the draft took over."""
        self.entered: dict[int, FinishedGroup] = {}
        """The groups that finished since, by number."""
        self.pending: set[int] = set()
        """Those among them whose trajectories a worker of another process has not stored yet."""
        self._numbered = numbered
        self._writer = ShardWriter(draft, TRAJECTORY_SCHEMA, config.rollout.rows_per_shard)

    @property
    def groups(self) -> int:
        return len(self.adopted) + len(self.entered)

    @property
    def numbers(self) -> list[int]:
        """The numbers of its groups; a spare problem that an older program played has none."""
        before = [note["group"] for note in self.adopted if note["group"] is not None]
        return sorted([*before, *self.entered])

    @property
    def rejected(self) -> int:
        """The number of rejected groups."""
        before = sum(bool(note["rejected"]) for note in self.adopted)
        return before + sum(finished.rejected for finished in self.entered.values())

    def enter(self, finished: FinishedGroup, *, pending: bool = False) -> None:
        """Count a finished group, whose trajectories are stored next, or by a worker later (`pending`)."""
        self.entered[finished.number] = finished
        if pending:
            self.pending.add(finished.number)
        self.tally.add(finished.counts)
        self.tally.report()

    def write(self, rows: Iterable[Trajectory], finished: FinishedGroup) -> None:
        """Store the trajectories of a group that was entered."""
        self._writer.write_group([replace(row, iteration=self.iteration) for row in rows], self.note(finished))

    def accept(self, shards: Sequence[Shard], numbers: Iterable[int]) -> None:
        """Take over shards that a worker has stored, with all trajectories of the groups with these numbers."""
        self.draft.accept_shards(shards)
        self.pending.difference_update(numbers)

    def lose(self, number: int) -> FinishedGroup:
        """Take back a group that is pending: the worker with its trajectories is gone."""
        self.pending.remove(number)
        finished = self.entered.pop(number)
        self.tally.remove(finished.counts)
        return finished

    def note(self, finished: FinishedGroup) -> dict[str, Any]:
        """Return what the journal keeps of a group."""
        note = {"problem_id": finished.problem_id, "rejected": finished.rejected}
        return note | {"group": finished.number} if self._numbered else note

    def flush(self) -> None:
        """Store what is still in memory."""
        self._writer.flush()

    def check(self, max_failed_share: float) -> None:
        """Raise ValueError if too many episodes failed; the next attempt then plays all of them again."""
        self.tally.report(last=True)
        try:
            self.tally.check(max_failed_share)
        except ValueError:
            self.draft.discard()
            raise

    def close(self) -> None:
        """Delete the local files."""
        self.draft.__exit__()
