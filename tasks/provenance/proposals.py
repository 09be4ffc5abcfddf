"""Propose exclusions before they are committed: a problem with all its trajectories, or trajectories by their ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.safety import check_plain
from storage.errors import counted, first_few
from storage.objects.store import Store
from storage.records import Exclusion
from storage.version_names import TrajectoriesVersion, select
from storage.visible import visible
from tasks.provenance.index import TrainingIndex
from tasks.provenance.questions import FoundProblem, find_problem


@dataclass(frozen=True, slots=True)
class Proposal:
    """Rows for `tasks.problems.exclusions.commit_exclusions`."""

    rows: list[Exclusion]  # 1 or more
    problem: FoundProblem | None  # the problem that is excluded as a whole
    trained: list[str]  # checkpoints that were trained on any of the rows; they stay unchanged
    unknown: dict[str, str]  # data sets that cannot be read, so that rows of them may be missing, with the reason


def propose_problem(store: Store, problem: str, cache: Path, reason: str, *, by_prompt: bool = False) -> Proposal:
    """Propose to exclude a whole problem, and list its trajectories.

    Args:
        store: the store of the data sets.
        problem: an id or a key, see `tasks.provenance.questions.trained_on`.
        cache: local folder for objects of a remote root.
        reason: why the problem is excluded, for later readers.
        by_prompt: `problem` is a part of the prompt.

    Raises:
        ValueError: `problem` means no problem or several, or the reason is empty or cannot be stored.
    """
    _check(reason)
    index = TrainingIndex(store, cache)
    with index.opened():
        found = find_problem(index, problem, by_prompt=by_prompt)
        index.load(None, "a.key = ? and t.prompt = ?", found.key, found.prompt)
        trained, rows = _trained(index), _rows(index, reason, whole=True)
        unknown = {version: index.unknown[version] for version in sorted(index.unreadable_data_sets(found.key))}
    unplayed = Exclusion("", "", "", -1, found.problem_ids[0], found.key, whole_problem=True, reason=reason)
    return Proposal(rows or [unplayed], found, trained, unknown)


def propose_ids(store: Store, ids: Sequence[str], cache: Path, reason: str) -> Proposal:
    """Propose to exclude trajectories by their ids. Other trajectories of the same problems stay in training.

    Raises:
        ValueError: no id is given, an id belongs to no trajectory that was played for training, or for the reasons of
            `propose_problem`.
    """
    _check(reason)
    distinct_ids = list(dict.fromkeys(ids))
    if not distinct_ids:
        raise ValueError("no ids are given: give one id in each line")
    index = TrainingIndex(store, cache)
    with index.opened():
        index.load(None, "t.trajectory_id in (select unnest(?::varchar[]))", distinct_ids)
        trained, rows = _trained(index), _rows(index, reason, whole=False)
    unreadable = select(TrajectoriesVersion, index.unknown)
    found = {row.trajectory_id for row in rows}
    if missing := [name for name in distinct_ids if name not in found]:
        lost = f"; these are collected or cannot be read: {first_few(sorted(unreadable))}"
        raise ValueError(
            f"{store.root} has no trajectories that were played for training with {counted(len(missing), 'id')}: "
            f"{visible(first_few(missing))}{lost if unreadable else ''}. Remove these ids; "
            "evaluations are never trained on"
        )
    return Proposal(rows, None, trained, {})


def _check(reason: str) -> None:
    if not reason.strip():
        raise ValueError("no reason is given: say why the rows are excluded, for later readers")
    check_plain({"reason": reason})


def _rows(index: TrainingIndex, reason: str, *, whole: bool) -> list[Exclusion]:
    found = index.database.all(
        """select distinct trajectory_id, version, split_part(version, '/', 2), split_part(version, '/', 4)::integer,
        problem_id, key, ?::boolean, ?::varchar from played order by version, trajectory_id""",
        *(whole, reason),
    )
    return [Exclusion(*row) for row in found]


def _trained(index: TrainingIndex) -> list[str]:
    """Return the checkpoints that were trained on any loaded trajectory."""
    rows = index.database.all("select distinct checkpoint from update_inputs where entered order by 1")
    return [checkpoint for (checkpoint,) in rows]
