"""Tasks: a night of retraining is opened, and ended."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from storage import layout
from storage.errors import DamagedError
from storage.logs.nights import End, Ending, Night, Nights, Record, now
from storage.version_names import DecisionVersion, PolicyVersion, ProblemsVersion
from storage.versions import aliases, manifests
from storage.versions.aliases import Move
from tasks.problems.task import commit_problems, import_sets, load_source, read_problems
from tasks.run.workspace import Workspace

if TYPE_CHECKING:
    from storage.records import Problem
    from tasks.retrain.planning import Chosen, Memory


def nights_of(workspace: Workspace) -> Nights:
    """The log of nights, to be written under the workspace's lease."""
    return Nights(workspace.store, workspace.name, workspace.lease)


@task(name="open-night", cache_policy=NO_CACHE)
def open_night(workspace: Workspace) -> Record | None:
    """The night that was begun and has not ended, or a new one; None where too few problems have come since the last.

    Raises:
        StorageError: the champion, an evaluation set or the log of nights is lost or damaged.
        ValueError: an evaluation set has changed, or is among the training problems; says what to do.
    """
    nights, logger = nights_of(workspace), get_run_logger()
    records = nights.read()
    if records and records[-1].end is None:
        logger.info("night %d has not ended: going on with it", records[-1].night.number)
        return records[-1]
    night = _plan(workspace, records)
    if night is None:
        return None
    nights.begin(night)
    counts = ", ".join(f"{count} {name}" for name, count in night.counts.items() if count)
    logger.info("night %d begins with problems: %s", night.number, counts)
    return Record(night)


def _plan(workspace: Workspace, records: Sequence[Record]) -> Night | None:
    from tasks.problems.difference import new_problems
    from tasks.retrain import planning

    config, least = workspace.config, workspace.config.retrain.min_new
    champion, sets = standing_champion(workspace), import_sets(workspace)
    planning.check_sets(sets, planning.pinned_sets(records, config))
    incoming, seen = _incoming(workspace), read_version(workspace, records[-1].night.seen if records else None)
    new = new_problems(incoming, seen)
    memory = planning.remembered(records, PolicyVersion(champion.version) if champion else None)
    if len(new) < least and not memory.retried:
        return None
    number = records[-1].night.number + 1 if records else 1
    _refuse_known(workspace, planning.night_run(config, number))
    chosen, dropped = _choose(workspace, number, new, memory, sets)
    if not chosen.fresh or (len(chosen.new) < least and not memory.retried):
        return None
    return _night(workspace, number, champion, memory, chosen, dropped, [*seen, *incoming], sets)


def _choose(
    workspace: Workspace, number: int, new: "Sequence[Problem]", memory: "Memory", sets: dict[str, ProblemsVersion]
) -> "tuple[Chosen, int]":
    """The night's problems, and how many of the new ones stand in evaluation sets and were left out."""
    from tasks.problems.difference import union
    from tasks.retrain.planning import choose, night_seed

    waiting = union(*(read_problems(workspace, version) for version in memory.waiting))
    known = [new, waiting, read_version(workspace, memory.accepted)]
    pools = keep_apart(workspace, sets, *(_allowed(workspace, problems) for problems in known))
    seed = night_seed(workspace.config, number)
    return choose(*pools, share=workspace.config.retrain.replay, seed=seed), len(new) - len(pools[0])


def _allowed(workspace: Workspace, problems: "Sequence[Problem]") -> "list[Problem]":
    """Without what `problems.exclusions` excludes."""
    from tasks.problems.difference import key
    from tasks.problems.exclusions import read_exclusions

    versions = workspace.config.problems.exclusions
    excluded = read_exclusions(workspace.store, versions, workspace.cache).problems if versions else ()
    return [problem for problem in problems if key(problem) not in excluded]


def _night(
    workspace: Workspace,
    number: int,
    champion: Move | None,
    memory: "Memory",
    chosen: "Chosen",
    dropped: int,
    seen: "Sequence[Problem]",
    sets: dict[str, ProblemsVersion],
) -> Night:
    from tasks.problems.difference import union
    from tasks.retrain.planning import night_config, night_run

    config, begins = workspace.config, PolicyVersion(champion.version) if champion else None
    version = commit_problems(workspace, chosen.problems, {"night": number})
    return Night(
        number=number,
        run=night_run(config, number),
        champion=begins,
        move=champion.number if champion else None,
        problems=version,
        fresh=commit_problems(workspace, chosen.fresh, {"night": number, "fresh": True}),
        accepted=memory.accepted,
        seen=commit_problems(workspace, union(seen), {"night": number, "seen": True}),
        counts={**chosen.counts, "dropped": dropped},
        sets=sets,
        config=night_config(config, workspace.store, number, begins, version, sets),
        at=now(),
    )


def _incoming(workspace: Workspace) -> "list[Problem]":
    """All problems there are; before the first file has come, none."""
    from tasks.problems.problem_set import NoFilesError

    try:
        return load_source(workspace, workspace.config.problems.train)
    except NoFilesError as error:
        get_run_logger().warning("%s", error)
        return []


def _refuse_known(workspace: Workspace, run: str) -> None:
    """Raises StorageError where a night's run is there before the night: the log may have lost its end."""
    if manifests.committed(workspace.store, layout.run(run)):
        raise DamagedError(
            f"the run {run!r} exists, but the log of retraining {workspace.name!r} knows no such night: has it lost "
            f"entries? `python -m storage --root {workspace.store.root} verify` tells. Nothing was changed"
        )


def standing_champion(workspace: Workspace) -> Move | None:
    """Where the alias points; None before there is a champion.

    Raises:
        StorageError: it points at what is no longer there, or was changed.
    """
    from storage.versions import checkpoints

    store, name = workspace.store, workspace.config.retrain.champion
    standing = aliases.current(store, name)
    if standing is None:
        return None
    try:
        checkpoints.resolve_policy(store, standing.version)
        if manifests.as_parent(store, standing.version).sha256 != standing.sha256:
            raise DamagedError(f"{store.uri(standing.version)} was changed since")
    except DamagedError as error:
        raise DamagedError(
            f"the alias {name!r} points at a champion that cannot be used: {error}. Nothing was changed; "
            f"`python -m storage alias rollback {name}` points it at the one before"
        ) from error
    return standing


def keep_apart(
    workspace: Workspace, sets: dict[str, ProblemsVersion], *pools: "Sequence[Problem]"
) -> "list[list[Problem]]":
    """The pools without the problems that stand in an evaluation set, too; see `evaluation.contamination`.

    Raises:
        ValueError: there are such problems, and they are to stop the retraining.
    """
    from tasks.problems.contamination import describe, find_overlaps
    from tasks.problems.difference import key, union

    everything, what = union(*pools), workspace.config.evaluation.contamination
    overlaps = find_overlaps(everything, {name: read_problems(workspace, version) for name, version in sets.items()})
    if overlaps and what == "stop":
        raise ValueError(
            f"{describe(overlaps)}\nTake them out of the training problems or of the sets; or set "
            "evaluation.contamination=drop to leave them out, or =report to train on them all the same"
        )
    if overlaps:
        get_run_logger().warning("%s", describe(overlaps))
    ids = {overlap.problem_id for overlap in overlaps} if what == "drop" else set[str]()
    taken = {key(problem) for problem in everything if problem.problem_id in ids}
    return [[problem for problem in pool if key(problem) not in taken] for pool in pools]


def read_version(workspace: Workspace, version: str | None) -> "list[Problem]":
    """The problems of a set, none where there is no set."""
    return read_problems(workspace, version) if version else []


@task(name="end-training", cache_policy=NO_CACHE)
def end_training(workspace: Workspace, record: Record, challenger: PolicyVersion) -> None:
    """Note that the night's training is over: started again, it goes on with what follows."""
    if record.challenger is None:
        nights = nights_of(workspace)
        nights.read()
        nights.trained(record.night.number, challenger)


@task(name="end-night", cache_policy=NO_CACHE)
def end_night(workspace: Workspace, night: Night, decision: DecisionVersion, outcome: Ending) -> Record:
    """Enter the night's end, and what becomes of its problems.

    Those of a promoted night are replayed in nights to come, those of a rejected one tried again together with the
    next new ones; but what made the policy worse is set aside.
    """
    from tasks.problems.difference import not_superseded, union

    numbers, nights = manifests.read(workspace.store, decision).metrics, nights_of(workspace)
    accepted, waiting = night.accepted, None if numbers["harmful"] else night.fresh
    if outcome == "promoted":
        fresh = read_problems(workspace, night.fresh)
        everything = union(fresh, not_superseded(read_version(workspace, night.accepted), fresh))
        accepted, waiting = commit_problems(workspace, everything, {"accepted": night.number}), None
    standing = aliases.current(workspace.store, workspace.config.retrain.champion)
    end = End(
        number=night.number,
        outcome=outcome,
        challenger=numbers["challenger"],
        decision=decision,
        move=standing.number if standing else None,
        accepted=accepted,
        waiting=waiting,
        at=now(),
    )
    nights.read()
    nights.end(end)
    return Record(night, end.challenger, end)
