"""Tasks of a night of retraining: open it, compare challenger and champion, promote, end it, report it.

A report is a Markdown artifact, files, a plot, and Prefect events that can trigger automations.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event

from flows.run.workspace import Workspace
from flows.stages.problems import commit_problems, import_sets, load_parts
from storage import layout
from storage.errors import AliasMovedError, DamagedError
from storage.logs.nights import End, Ending, Night, Nights, Record, now
from storage.objects.store import Store
from storage.records import Problem
from storage.version_names import DecisionVersion, PolicyVersion, ProblemsVersion, ScoresVersion
from storage.versions import aliases, checkpoints, lineage, manifests
from storage.visible import printable
from tasks.evaluate.outcomes import compare, read_outcomes, summary_of
from tasks.inference.api import derive
from tasks.problems.contamination import describe, find_overlaps
from tasks.problems.exclusions import read_exclusions
from tasks.problems.problem_set import NoFilesError, key, new_problems, not_superseded, replayed, union
from tasks.retrain import gate, planning
from tasks.retrain.report import night_markdown, timeline
from tasks.train.orders import DistanceOrder, OrderedTrainer

Evaluations = dict[PolicyVersion, dict[str, list[ScoresVersion]]]
"""Versions of scores by policy and name of the set, see `flows.stages.evaluate.evaluate_sets`."""
EVENTS = "math-mt-ppo.retrain"
"""Prefix of the events: `.promoted`, `.rejected`, `.overtaken`, `.alarm`, `.nothing-new`."""


@task(name="open-night", cache_policy=NO_CACHE)
def open_night(workspace: Workspace) -> Record | None:
    """Return the unfinished night, or begin a new one; None if too few new problems have come since the last night.

    Raises:
        StorageError: the champion, an evaluation set or the log of nights is lost or damaged.
        ValueError: an evaluation set has changed; the message says what to do.
    """
    nights, logger = Nights(workspace.store, workspace.name, workspace.lease), get_run_logger()
    records = nights.read()
    if records and records[-1].end is None:
        logger.info("night %d has not ended: continuing it", records[-1].night.number)
        return records[-1]
    if (night := _plan(workspace, records)) is None:
        return None
    nights.begin(night)
    counts = ", ".join(f"{count} {name}" for name, count in night.counts.items() if count)
    logger.info("night %d begins with problems: %s", night.number, counts)
    return Record(night)


def _plan(workspace: Workspace, records: Sequence[Record]) -> Night | None:
    """Plan the next night; None if too few new problems have come, and none wait by hand."""
    config, store = workspace.config, workspace.store
    if config.problems.members:
        raise ValueError("problems.train is a mixture, but a night trains on the problems of one source: give one")
    standing, sets = standing_champion(workspace), import_sets(workspace)
    champion = PolicyVersion(standing.version) if standing else None
    planning.check_sets(sets, records, config)
    try:
        incoming = load_parts(workspace, config.problems.trained)
    except NoFilesError as error:  # before the first file exists
        get_run_logger().warning("%s", error)
        incoming = []
    seen = workspace.read_problems(records[-1].night.seen if records else None)
    new, (left, trained) = new_problems(incoming, seen), planning.remembered(records, champion)
    retried = bool(records and records[-1].retried)  # then a night begins even without new problems
    least = 0 if retried else config.retrain.min_new
    if len(new) < least:
        return None
    number = records[-1].night.number + 1 if records else 1
    run = planning.night_run(config, number)
    if manifests.committed(store, layout.run(run)):
        raise DamagedError(
            f"the run {run!r} exists, but the log of retraining {workspace.name!r} knows no such night: it may have "
            f"lost entries. Check with `python -m storage --root {store.root} verify`. Nothing was changed"
        )
    waiting = union(*(workspace.read_problems(version) for version in left))
    excluded = read_exclusions(store, config.problems.exclusions, workspace.cache)
    pools = (new, waiting, workspace.read_problems(trained))
    candidates = [[problem for problem in pool if not excluded.has_problem(problem)] for pool in pools]
    kept, waiting, accepted = keep_apart(workspace, sets, *candidates)
    waiting = not_superseded(waiting, kept)  # if a prompt comes again, its answer was corrected
    fresh = union(kept, waiting)
    if not fresh or len(kept) < least:
        return None
    seed = derive(config.run.seed, "night", number)
    again = replayed(fresh, config.retrain.replay, not_superseded(accepted, fresh), seed)
    counts = {"new": len(kept), "waiting": len(waiting), "replayed": len(again), "dropped": len(new) - len(kept)}
    problems = commit_problems(workspace, union(fresh, again), {"night": number})
    return Night(
        number=number,
        run=run,
        champion=champion,
        move=standing.number if standing else None,
        problems=problems,
        fresh=commit_problems(workspace, fresh, {"night": number, "fresh": True}),
        accepted=trained,
        seen=commit_problems(workspace, union([*seen, *incoming]), {"night": number, "seen": True}),
        counts=counts,
        sets=sets,
        config=planning.night_config(config, store, number, champion, problems, sets),
        at=now(),
    )


def standing_champion(workspace: Workspace) -> aliases.Move | None:
    """Return the last move of the champion's alias; None before there is a champion.

    Raises:
        StorageError: the alias points at a version that no longer exists, or that was changed.
    """
    store, name = workspace.store, workspace.config.retrain.champion
    if (standing := aliases.current(store, name)) is None:
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
    """Return the pools without problems that are also in an evaluation set, and name the first ones in the log."""
    candidates = union(*pools)
    overlaps = find_overlaps(candidates, {name: workspace.read_problems(version) for name, version in sets.items()})
    if overlaps:
        get_run_logger().warning("left out: %s", describe(overlaps))
    ids = {overlap.problem_id for overlap in overlaps}
    dropped = {key(problem) for problem in candidates if problem.problem_id in ids}
    return [[problem for problem in pool if key(problem) not in dropped] for pool in pools]


@task(name="crown-first", cache_policy=NO_CACHE)
def crown_first(workspace: Workspace, night: Night) -> PolicyVersion:
    """Return the champion that the night's challenger must beat; without a champion, policy version 0 becomes it."""
    if night.champion:
        return night.champion
    alias, first = workspace.config.retrain.champion, layout.checkpoint(workspace.name, 0)
    if aliases.current(workspace.store, alias) is None:
        aliases.move(workspace.store, alias, first, None, "first champion", workspace.label)
    return first


@task(name="measure-distance", cache_policy=NO_CACHE)
def measure_distance(
    workspace: Workspace, trainer: OrderedTrainer, champion: PolicyVersion, challenger: PolicyVersion
) -> float | None:
    """Compute the mean KL in nats per token of challenger and champion, at the night's last trajectories' tokens."""
    last = challenger.number - 1
    if last < 0:
        return None
    trajectories, scores = lineage.trained_on(workspace.store, workspace.name, last)
    return trainer.distance(DistanceOrder(challenger, champion, trajectories, scores))


@task(name="decide", cache_policy=NO_CACHE)
def decide(
    workspace: Workspace,
    retraining: Workspace,
    champion: PolicyVersion,
    challenger: PolicyVersion,
    evaluations: Evaluations,
    distance: float | None,
) -> DecisionVersion:
    """Commit the gate's decision with all its numbers, unless it exists, and return its version.

    The log of the `retraining` says how many gates have looked at the target set before. The parents are champion,
    challenger and the scores that were compared.
    """
    store, version = workspace.store, layout.decision(workspace.name)
    with workspace.stage(version) as draft:
        if draft is None:
            return version
        settings = workspace.config.retrain.gate
        look = planning.looks(Nights(retraining.store, retraining.name).read())
        before, after = evaluations[champion], evaluations[challenger]
        index = int(settings.episodes == "sampled")  # greedy episodes come first
        comparisons = {
            name: compare(*(read_outcomes(store, sets[name][index], workspace.cache) for sets in (before, after)))
            for name in after
        }
        solved, tokens, failed = training_of(store, challenger)
        evidence = gate.GateEvidence(comparisons, failed, distance, solved, look)
        numbers: dict[str, Any] = {
            "champion": champion,
            "challenger": challenger,
            **asdict(gate.decide(evidence, settings)),
            "gate": settings.model_dump(mode="json"),
            "comparisons": comparisons,
            "accuracy": {
                policy: {name: summary_of(store, versions) for name, versions in sets.items()}
                for policy, sets in evaluations.items()
            },
            "training": {"solved": solved, "tokens": tokens},
            "distance": distance,
            "failed_verdicts": failed,
        }
        compared = [scores for sets in evaluations.values() for versions in sets.values() for scores in versions]
        draft.commit(workspace.provenance(), list(dict.fromkeys([champion, challenger, *compared])), numbers)
    return version


def training_of(store: Store, challenger: PolicyVersion) -> tuple[list[float], int, float]:
    """Read what `challenger` was trained on, in the data that its checkpoints name.

    Returns:
        the share of solved episodes of each iteration, all sampled tokens, and the share of timeouts and errors among
        the verdicts on answers.
    """
    data = [lineage.trained_on(store, challenger.run, iteration) for iteration in range(challenger.number)]
    played, graded = ([manifests.read(store, pair[place]).metrics for pair in data] for place in (0, 1))
    failed = sum(metrics["verdicts"].get(name, 0) for metrics in graded for name in ("timeout", "error"))
    answers = sum(metrics["turns"] - metrics["verdicts"].get("none", 0) for metrics in graded)
    tokens = sum(metrics["generated_tokens"] for metrics in played)
    return [metrics["solved"] for metrics in played], tokens, float(failed / max(1, answers))


@task(name="promote", cache_policy=NO_CACHE)
def promote(workspace: Workspace, night: Night, decision: DecisionVersion) -> Ending:
    """Point the champion's alias at the challenger, if the gate promotes it and the alias was not moved meanwhile."""
    numbers = manifests.read(workspace.store, decision).metrics
    if not numbers["promote"]:
        return "rejected"
    store, alias = workspace.store, workspace.config.retrain.champion
    moves, base = aliases.history(store, alias), night.move or 0
    if [move.version for move in moves[base : base + 2]] == [numbers["champion"], numbers["challenger"]]:
        return "promoted"  # an earlier flow run of this night moved the alias; later moves do not matter
    try:
        if [move.version for move in moves[base:]] != [numbers["champion"]]:
            raise AliasMovedError(f"alias {alias!r} was moved by another writer while the night lasted")
        aliases.move(store, alias, numbers["challenger"], base, f"night {night.number}: better", workspace.label)
    except AliasMovedError as error:
        get_run_logger().error("%s. The challenger is not promoted: it was not compared with this champion", error)
        return "overtaken"
    return "promoted"


@task(name="end-training", cache_policy=NO_CACHE)
def end_training(workspace: Workspace, record: Record, challenger: PolicyVersion) -> None:
    """Log that the night's training has ended, so a restarted night continues after it."""
    if record.challenger is None:
        nights = Nights(workspace.store, workspace.name, workspace.lease)
        nights.read()
        nights.trained(record.night.number, challenger)


@task(name="end-night", cache_policy=NO_CACHE)
def end_night(workspace: Workspace, night: Night, decision: DecisionVersion, outcome: Ending) -> Record:
    """Log the end of the night and what happens to its problems.

    The problems of a promoted night are replayed in later nights. The problems of a rejected night are tried again with
    the next new ones, unless they made the policy worse: then they are set aside.
    """
    nights = Nights(workspace.store, workspace.name, workspace.lease)
    numbers = manifests.read(workspace.store, decision).metrics
    accepted, waiting = night.accepted, None if numbers["harmful"] else night.fresh
    if outcome == "promoted":
        fresh = workspace.read_problems(night.fresh)
        together = union(fresh, not_superseded(workspace.read_problems(night.accepted), fresh))
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


@task(name="report-night", cache_policy=NO_CACHE)
def report_night(workspace: Workspace, record: Record) -> str:
    """Write the night's report to the retraining's folder, show it, and emit its events; return the outcome."""
    store, config, night, end = workspace.store, workspace.config, record.night, record.end
    assert end
    assert end.decision
    decision = manifests.read(store, end.decision).metrics
    text = night_markdown(store, config, record)
    print(printable(text))
    create_markdown_artifact(key="night", markdown=text, description=f"Night {night.number} of {workspace.name}")
    create_table_artifact(key="nights", table=timeline(store, config), description=f"Champions of {workspace.name}")
    report = store.uri(f"{layout.retraining(workspace.name)}/report")
    payload = {key: decision[key] for key in ("champion", "challenger")}
    payload |= {"night": night.number, "decision": end.decision, "report": report}
    alarms = [check for check in decision["checks"] if check["kind"] == "alarm" and not check["passed"]]
    if alarms:
        _emit(workspace, "alarm", payload | {"alarms": [f"{check['subject']}: {check['says']}" for check in alarms]})
    _emit(workspace, end.outcome, payload)
    store.write(_report(workspace, night), text.encode())  # last: this file marks the night as reported
    get_run_logger().info("night %d: %s; report in %s", night.number, end.outcome, report)
    return end.outcome


def report_last(workspace: Workspace) -> None:
    """Report the last night that ended, unless it was reported."""
    ended = [record for record in Nights(workspace.store, workspace.name).read() if record.end and record.end.decision]
    if ended and not workspace.store.exists(_report(workspace, ended[-1].night)):
        report_night(workspace, ended[-1])


def _report(workspace: Workspace, night: Night) -> str:
    return f"{layout.retraining(workspace.name)}/report/night-{night.number:04d}.md"


@task(name="nothing-new", cache_policy=NO_CACHE)
def report_nothing_new(workspace: Workspace) -> str:
    """Log that too few problems have come since the last night, and emit the event."""
    least = workspace.config.retrain.min_new
    get_run_logger().info("nothing new: fewer than %d problems have come since the last night", least)
    _emit(workspace, "nothing-new", {"min_new": least})
    return "nothing new"


def _emit(workspace: Workspace, event: str, payload: dict[str, Any]) -> None:
    name = workspace.name
    resource = {"prefect.resource.id": f"math-mt-ppo.retraining.{name}", "prefect.resource.name": name}
    emit_event(event=f"{EVENTS}.{event}", resource=resource, payload=payload)
