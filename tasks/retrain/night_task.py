"""Tasks: open and end a night of retraining."""

from collections.abc import Sequence

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from storage import layout
from storage.errors import DamagedError
from storage.logs.nights import End, Ending, Night, Nights, Record, now
from storage.records import Problem
from storage.version_names import DecisionVersion, PolicyVersion, ProblemsVersion
from storage.versions import aliases, checkpoints, manifests
from storage.versions.aliases import Move
from tasks.problems.contamination import describe, find_overlaps
from tasks.problems.exclusions import read_exclusions
from tasks.problems.problem_set import NoFilesError, key, new_problems, not_superseded, union
from tasks.problems.task import commit_problems, import_sets, load_source, read_problems
from tasks.retrain.planning import (
    Chosen,
    Memory,
    check_sets,
    choose,
    night_config,
    night_run,
    night_seed,
    pinned_sets,
    remembered,
)
from tasks.run.workspace import Workspace


def nights_of(workspace: Workspace) -> Nights:
    """Open the log of nights, which is written under the workspace's lease."""
    return Nights(workspace.store, workspace.name, workspace.lease)


@task(name="open-night", cache_policy=NO_CACHE)
def open_night(workspace: Workspace) -> Record | None:
    """Return the unfinished night, or begin a new one; None if too few new problems have come since the last night.

    Raises:
        StorageError: the champion, an evaluation set or the log of nights is lost or damaged.
        ValueError: an evaluation set has changed, or training problems are in an evaluation set; the message says what
            to do.
    """
    nights, logger = nights_of(workspace), get_run_logger()
    records = nights.read()
    if records and records[-1].end is None:
        logger.info("night %d has not ended: continuing it", records[-1].night.number)
        return records[-1]
    night = _plan(workspace, records)
    if night is None:
        return None
    nights.begin(night)
    counts = ", ".join(f"{count} {name}" for name, count in night.counts.items() if count)
    logger.info("night %d begins with problems: %s", night.number, counts)
    return Record(night)


def _plan(workspace: Workspace, records: Sequence[Record]) -> Night | None:
    config, least = workspace.config, workspace.config.retrain.min_new
    champion, sets = standing_champion(workspace), import_sets(workspace)
    check_sets(sets, pinned_sets(records, config))
    incoming, seen = _incoming(workspace), read_version(workspace, records[-1].night.seen if records else None)
    new = new_problems(incoming, seen)
    memory = remembered(records, PolicyVersion(champion.version) if champion else None)
    if len(new) < least and not memory.retried:
        return None
    number = records[-1].night.number + 1 if records else 1
    _refuse_existing(workspace, night_run(config, number))
    chosen, dropped = _choose(workspace, number, new, memory, sets)
    if not chosen.fresh or (len(chosen.new) < least and not memory.retried):
        return None
    return _night(workspace, number, champion, memory, chosen, dropped, [*seen, *incoming], sets)


def _choose(
    workspace: Workspace, number: int, new: Sequence[Problem], memory: Memory, sets: dict[str, ProblemsVersion]
) -> tuple[Chosen, int]:
    """Choose the night's problems; count the new ones that were left out because evaluation sets hold them."""
    waiting = union(*(read_problems(workspace, version) for version in memory.waiting))
    candidates = [new, waiting, read_version(workspace, memory.accepted)]
    pools = keep_apart(workspace, sets, *(_without_excluded(workspace, problems) for problems in candidates))
    seed = night_seed(workspace.config, number)
    return choose(*pools, share=workspace.config.retrain.replay, seed=seed), len(new) - len(pools[0])


def _without_excluded(workspace: Workspace, problems: Sequence[Problem]) -> list[Problem]:
    """Leave out the problems that `problems.exclusions` excludes."""
    versions = workspace.config.problems.exclusions
    excluded = read_exclusions(workspace.store, versions, workspace.cache).problems if versions else ()
    return [problem for problem in problems if key(problem) not in excluded]


def _night(
    workspace: Workspace,
    number: int,
    champion: Move | None,
    memory: Memory,
    chosen: Chosen,
    dropped: int,
    seen: Sequence[Problem],
    sets: dict[str, ProblemsVersion],
) -> Night:
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


def _incoming(workspace: Workspace) -> list[Problem]:
    """Load all problems of the training source; none before the first file exists."""
    try:
        return load_source(workspace, workspace.config.problems.train)
    except NoFilesError as error:
        get_run_logger().warning("%s", error)
        return []


def _refuse_existing(workspace: Workspace, run: str) -> None:
    """Raise StorageError if the run of a new night exists already: the log may have lost its last entries."""
    if manifests.committed(workspace.store, layout.run(run)):
        raise DamagedError(
            f"the run {run!r} exists, but the log of retraining {workspace.name!r} knows no such night: it may have "
            f"lost entries. Check with `python -m storage --root {workspace.store.root} verify`. Nothing was changed"
        )


def standing_champion(workspace: Workspace) -> Move | None:
    """Return the last move of the champion's alias; None before there is a champion.

    Raises:
        StorageError: the alias points at a version that no longer exists, or that was changed.
    """
    store, name = workspace.store, workspace.config.retrain.champion
    standing = aliases.current(store, name)
    if standing is None:
        return None
    try:
        checkpoints.resolve_policy(store, standing.version)
        if manifests.as_parent(store, standing.version).sha256 != standing.sha256:
            raise DamagedError(f"{store.uri(standing.version)} was changed after the alias was moved")
    except DamagedError as error:
        raise DamagedError(
            f"the alias {name!r} points at a champion that cannot be used: {error}. Nothing was changed; "
            f"`python -m storage alias rollback {name}` points it at the champion before"
        ) from error
    return standing


def keep_apart(
    workspace: Workspace, sets: dict[str, ProblemsVersion], *pools: Sequence[Problem]
) -> list[list[Problem]]:
    """Return the pools without problems that are also in an evaluation set, as `evaluation.contamination` says.

    Raises:
        ValueError: there are such problems, and `evaluation.contamination` is `stop`.
    """
    candidates, when_found = union(*pools), workspace.config.evaluation.contamination
    overlaps = find_overlaps(candidates, {name: read_problems(workspace, version) for name, version in sets.items()})
    if overlaps and when_found == "stop":
        raise ValueError(
            f"{describe(overlaps)}\nRemove them from the training problems or from the sets; or set "
            "evaluation.contamination=drop to leave them out, or =report to train on them anyway"
        )
    if overlaps:
        get_run_logger().warning("%s", describe(overlaps))
    ids = {overlap.problem_id for overlap in overlaps} if when_found == "drop" else set[str]()
    dropped = {key(problem) for problem in candidates if problem.problem_id in ids}
    return [[problem for problem in pool if key(problem) not in dropped] for pool in pools]


def read_version(workspace: Workspace, version: str | None) -> list[Problem]:
    """Read the problems of a set; return none if `version` is None."""
    return read_problems(workspace, version) if version else []


@task(name="end-training", cache_policy=NO_CACHE)
def end_training(workspace: Workspace, record: Record, challenger: PolicyVersion) -> None:
    """Log that the night's training has ended, so a restarted night continues after it."""
    if record.challenger is None:
        nights = nights_of(workspace)
        nights.read()
        nights.trained(record.night.number, challenger)


@task(name="end-night", cache_policy=NO_CACHE)
def end_night(workspace: Workspace, night: Night, decision: DecisionVersion, outcome: Ending) -> Record:
    """Log the end of the night and what happens to its problems.

    The problems of a promoted night are replayed in later nights. The problems of a rejected night are tried again with
    the next new ones, unless they made the policy worse: then they are set aside.
    """
    numbers, nights = manifests.read(workspace.store, decision).metrics, nights_of(workspace)
    accepted, waiting = night.accepted, None if numbers["harmful"] else night.fresh
    if outcome == "promoted":
        fresh = read_problems(workspace, night.fresh)
        together = union(fresh, not_superseded(read_version(workspace, night.accepted), fresh))
        accepted, waiting = commit_problems(workspace, together, {"accepted": night.number}), None
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
