"""What is to be excluded, before it is: a problem with all that was played of it, or trajectories by their ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.plain import check_plain
from storage import layout
from storage.objects.store import Store
from storage.records import Exclusion
from storage.version_names import TrajectoriesVersion, select
from storage.visible import visible
from tasks.provenance.answers import Unknown
from tasks.provenance.asked import FoundProblem, find_problem
from tasks.provenance.family import Family
from tasks.provenance.plays import Plays

_NAMED = 5  # ids that a message spells out


@dataclass(frozen=True, slots=True)
class Proposal:
    """Rows for `tasks.problems.exclusions.commit_exclusions`."""

    rows: list[Exclusion]  # 1 or more
    problem: FoundProblem | None  # that is excluded whole
    trained: list[str]  # checkpoints that were trained on any of it, and stay as they are
    unknown: list[Unknown]  # data sets that cannot be read: what of them should be listed, nobody knows


def propose_problem(
    store: Store, problem: str, cache: Path, reason: str, *, run: str | None = None, by_prompt: bool = False
) -> Proposal:
    """A whole problem: all trajectories of it that were played, by `run` or by all.

    Args:
        store: where they lie.
        problem: see `tasks.provenance.questions.trained_on`.
        cache: local folder for objects of a remote root.
        reason: for those who ask later.
        run: list only what this run played; nothing else of the problem is trained on either.
        by_prompt: `problem` is a part of the prompt.

    Raises:
        ValueError: no problem, or several are meant; there is no such run; no reason is given, or one that cannot be
            stored.
    """
    _check(reason)
    family = Family(store, cache)
    with family.plays(run) as plays:
        asked = find_problem(plays, problem, by_prompt=by_prompt)
        plays.load("a.key = ? and t.prompt = ?", asked.key, asked.prompt)
        trained = _trained(family, plays)
        rows = _rows(plays, reason, whole=True)
        unknown = [Unknown(version, plays.unknown[version]) for version in sorted(family.unread(plays, asked.key))]
    unplayed = Exclusion("", "", "", -1, asked.problem_ids[0], asked.key, whole_problem=True, reason=reason)
    return Proposal(rows or [unplayed], asked, trained, unknown)


def propose_ids(store: Store, ids: Sequence[str], cache: Path, reason: str, *, run: str | None = None) -> Proposal:
    """Trajectories by their ids; their problems stay.

    Raises:
        ValueError: an id is that of no trajectory that can be trained on; there is none; see `propose_problem`.
    """
    _check(reason)
    wanted = list(dict.fromkeys(ids))
    if not wanted:
        raise ValueError("no ids are given: one in each line")
    family = Family(store, cache)
    with family.plays(run) as plays:
        plays.load("t.trajectory_id in (select unnest(?::varchar[]))", wanted)
        trained, rows = _trained(family, plays), _rows(plays, reason, whole=False)
        gone = sorted(select(TrajectoriesVersion, plays.unknown))
    found = {row.trajectory_id for row in rows}
    if missing := [name for name in wanted if name not in found]:
        raise ValueError(_missing(store, missing, gone))
    return Proposal(rows, None, trained, [])


def _check(reason: str) -> None:
    if not reason.strip():
        raise ValueError("no reason is given: say why, for those who ask later")
    check_plain({"reason": reason})


def _rows(plays: Plays, reason: str, *, whole: bool) -> list[Exclusion]:
    found = plays.database.all(
        "select distinct trajectory_id, version, problem_id, key from plays order by version, trajectory_id"
    )
    return [
        Exclusion(
            name, version, layout.run_of(version) or "", layout.number_of(version) or 0, problem, key, whole, reason
        )
        for name, version, problem, key in found
    ]


def _trained(family: Family, plays: Plays) -> list[str]:
    family.use(plays, list(family.updates.values()))
    rows = plays.database.all("select distinct checkpoint from used where entered order by 1")
    return [checkpoint for (checkpoint,) in rows]


def _missing(store: Store, missing: Sequence[str], gone: Sequence[str]) -> str:
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    lost = f"; of {len(gone)} data sets the data are gone or cannot be read, such as {gone[0]}" if gone else ""
    return (
        f"{len(missing)} ids are those of no trajectories that were played for training in {store.root}: "
        f"{visible(', '.join(missing[:_NAMED]))}{more}{lost}. Take them out; evaluations are never trained on"
    )
