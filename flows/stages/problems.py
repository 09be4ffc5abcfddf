"""Tasks: import problem sets as versions named by their fingerprints, and commit the run's curriculum."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from configs.evaluate import HELD_OUT
from configs.problems import NamedSource, StoredSource
from flows.run.workspace import Workspace
from storage import layout
from storage.errors import counted, first_few
from storage.records import CURRICULUM_SCHEMA, PROBLEM_SCHEMA, CurriculumEntry, Problem
from storage.version_names import ProblemsVersion, select
from storage.versions import datasets, manifests
from tasks.problems import ProblemError, contamination, curriculum, fingerprint, mixture
from tasks.problems.problem_set import listed
from tasks.provenance.questions import results
from tasks.score.scorers import use_of_solutions

_ROWS_PER_SHARD = 50_000
_REPORTED = 20
TRAIN = "train"
FIXED_SETS = "problem_sets"
"""The metric of policy version 0 with the sets that its run keeps."""


@task(name="import-problems", cache_policy=NO_CACHE)
def import_problems(workspace: Workspace) -> tuple[ProblemsVersion, ProblemsVersion]:
    """Import the training and the held-out problem set; return their versions.

    A run that continues keeps the sets that it began with (`begun_sets`), whatever its sources have now. Warn about
    training problems that are in the held-out set. If `problems.sampling` uses the results of runs, commit the run's
    curriculum, too.

    Raises:
        ProblemError: a source cannot be read, or too many of its rows are bad, when the run begins.
        StorageError: a stored set does not exist.
    """
    problems, begun = workspace.config.problems, begun_sets(workspace)
    sets = {TRAIN: problems.trained, HELD_OUT: problems.evaluated}
    train, held_out = (begun.get(name) or import_parts(workspace, parts) for name, parts in sets.items())
    rows = {name: workspace.read_problems(version) for name, version in ((TRAIN, train), (HELD_OUT, held_out))}
    for name, version in ((TRAIN, train), (HELD_OUT, held_out)):
        numbers = Counter(problem.source for problem in rows[name]) if problems.members else {}
        of_each = "".join(f", {count} of {source}" for source, count in numbers.items())
        kept = ", which the run began with" if name in begun else ""
        get_run_logger().info("%s: %s%s, %s%s", name, counted(len(rows[name]), "problem"), of_each, version, kept)
    if overlaps := contamination.find_overlaps(rows[TRAIN], {HELD_OUT: rows[HELD_OUT]}):
        get_run_logger().warning("%s", contamination.describe(overlaps))
    plan_curriculum(workspace, train)
    return train, held_out


@task(name="import-sets", cache_policy=NO_CACHE)
def import_sets(workspace: Workspace, names: Sequence[str] = ()) -> dict[str, ProblemsVersion]:
    """Import the evaluation sets `names`, or all of them; return their versions by name.

    Raises:
        ValueError: no evaluation set has that name.
        ProblemError, StorageError: see `import_problems`.
    """
    own = {name: [NamedSource(source)] for name, source in workspace.config.evaluation.sets.items()}
    sets = {HELD_OUT: workspace.config.problems.evaluated} | own
    if unknown := [name for name in names if name not in sets]:
        raise ValueError(f"there is no evaluation set {unknown[0]!r}; there are {', '.join(sets)}")
    return {name: import_parts(workspace, sets[name]) for name in names or sets}


def import_parts(workspace: Workspace, parts: Sequence[NamedSource]) -> ProblemsVersion:
    """Import the problems of some parts as one set; return its version."""
    (source, name, _), *others = parts
    if isinstance(source, StoredSource) and not name and not others:
        manifests.read(workspace.store, source.version)  # it must be there
        return ProblemsVersion(source.version)
    sources = {part.name: part.source.model_dump(mode="json") for part in parts}
    described: dict[str, object] = sources[""] if list(sources) == [""] else {"mixture": sources}
    return commit_problems(workspace, load_parts(workspace, parts), described)


def begun_sets(workspace: Workspace) -> dict[str, ProblemsVersion]:
    """Return the problem sets that a run began with, by `TRAIN` and `HELD_OUT`; without those that are not fixed yet.

    Policy version 0 fixes both, a curriculum that of training.
    """
    store, name = workspace.store, workspace.name
    first = manifests.find(store, layout.checkpoint(name, 0))
    if first and (fixed := first.metrics.get(FIXED_SETS)):
        return {key: ProblemsVersion(version) for key, version in fixed.items()}
    curriculum = manifests.find(store, layout.curriculum(name))
    drawn_from = select(ProblemsVersion, curriculum.parent_names) if curriculum else []
    return {TRAIN: drawn_from[0]} if drawn_from else {}


def load_parts(workspace: Workspace, parts: Sequence[NamedSource]) -> list[Problem]:
    """Load the problems of a set; log the rows that are left out.

    Raises:
        ProblemError: a part cannot be loaded, or two of them have a problem with the same id.
    """
    config, logger, problems = workspace.config, get_run_logger(), list[Problem]()
    use = partial(use_of_solutions, config.score)
    for part in parts:
        loaded = mixture.load_source(part, config.problems.max_bad_share, use, workspace.read_problems)
        problems += loaded.problems
        for what, rows in (("dropped", loaded.bad), ("left out", loaded.left_out)):
            for line in listed(rows, _REPORTED):
                logger.warning("%s%s: %s: %s", part.where, part.source.kind, what, line)
    names = Counter(problem.problem_id for problem in problems)
    if twice := [name for name, count in names.items() if count > 1 and len(parts) > 1]:
        raise ProblemError(f"parts of a problem set share ids ({first_few(twice, 5)}): rename a member of the mixture")
    return problems


def commit_problems(workspace: Workspace, problems: Sequence[Problem], source: dict[str, object]) -> ProblemsVersion:
    """Commit a problem set, unless it exists, and return its version."""
    version = layout.problems(fingerprint(problems))
    with workspace.stage(version) as draft:
        if draft:
            datasets.write_rows(draft, PROBLEM_SCHEMA, problems, _ROWS_PER_SHARD)
            draft.commit(workspace.provenance(), [], {"problems": len(problems), "source": source})
    return version


def plan_curriculum(workspace: Workspace, problem_set: ProblemsVersion) -> None:
    """Commit the run's curriculum once, from the stored episodes of all other runs in the store."""
    config, store = workspace.config.problems, workspace.store
    if not config.sampling.active:
        return
    with workspace.stage(layout.curriculum(workspace.name)) as draft:
        if draft is None:
            return
        past, newest = results(store, workspace.cache, leave_out=workspace.name, most=curriculum.LAST_EPISODES)
        entries = list[CurriculumEntry]()
        for part, problems in mixture.by_member(config, workspace.read_problems(problem_set)):
            with mixture.naming(part.where):
                planned = curriculum.plan_curriculum(problems, past, config.sampling)
            entries += planned
            totals = ", ".join(f"{count} {standing}" for standing, count in curriculum.standings(planned).items())
            get_run_logger().info("%scurriculum from %s: %s", part.where, counted(len(newest), "run"), totals)
        datasets.write_rows(draft, CURRICULUM_SCHEMA, entries, _ROWS_PER_SHARD)
        draft.commit(workspace.provenance(), [problem_set, *newest], curriculum.standings(entries))


def weights(workspace: Workspace) -> Mapping[str, float] | None:
    """Read the weight of each problem from the curriculum; return None if the run draws all problems in turn."""
    if not workspace.config.problems.sampling.active:
        return None
    rows = datasets.rows(workspace.store, layout.curriculum(workspace.name), workspace.cache, ["problem_id", "weight"])
    return {row["problem_id"]: row["weight"] for row in rows}
