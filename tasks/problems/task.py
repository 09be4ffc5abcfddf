"""Tasks: import problem sets as versions named by their fingerprints, and warn about contamination."""

from collections.abc import Sequence

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from configs.schema import HELD_OUT, Source, StoredSource
from storage import layout
from storage.errors import DamagedError
from storage.records import PROBLEM_SCHEMA, Problem
from storage.version_names import ProblemsVersion
from storage.versions import datasets, manifests
from storage.versions.datasets import write_rows
from storage.versions.drafts import Draft
from tasks.problems import fingerprint, load_problems
from tasks.problems.contamination import describe, find_overlaps
from tasks.problems.curriculum_task import plan_curriculum
from tasks.run.workspace import Workspace

_ROWS_PER_SHARD = 50_000
_REPORTED = 20


@task(name="import-problems", cache_policy=NO_CACHE)
def import_problems(workspace: Workspace) -> tuple[ProblemsVersion, ProblemsVersion]:
    """Import the training and the held-out problem set; return their versions.

    Warn about training problems that are in the held-out set. If `problems.sampling` uses the history of runs, commit
    the run's curriculum, too.

    Raises:
        ProblemError: a source cannot be read, or too many of its rows are bad.
        StorageError: a stored set does not exist.
    """
    problems = workspace.config.problems
    train, held_out = (import_source(workspace, source) for source in (problems.train, problems.held_out))
    if overlaps := find_overlaps(read_problems(workspace, train), {HELD_OUT: read_problems(workspace, held_out)}):
        get_run_logger().warning("%s", describe(overlaps))
    plan_curriculum(workspace, train)
    return train, held_out


@task(name="import-sets", cache_policy=NO_CACHE)
def import_sets(workspace: Workspace, names: Sequence[str] = ()) -> dict[str, ProblemsVersion]:
    """Import the evaluation sets `names`, or all of them; return their versions by name.

    Raises:
        ValueError: no evaluation set has that name.
        ProblemError, StorageError: see `import_problems`.
    """
    sources = {HELD_OUT: workspace.config.problems.held_out} | workspace.config.evaluation.sets
    if unknown := [name for name in names if name not in sources]:
        raise ValueError(f"there is no evaluation set {unknown[0]!r}; there are {', '.join(sources)}")
    return {name: import_source(workspace, sources[name]) for name in names or sources}


def import_source(workspace: Workspace, source: Source) -> ProblemsVersion:
    """Import the problems of `source`; return their version."""
    if isinstance(source, StoredSource):
        if manifests.read(workspace.store, source.version).kind != "problems":
            raise DamagedError(f"{source.version} is not a problem set: give a version whose kind is problems")
        return ProblemsVersion(source.version)
    return commit_problems(workspace, load_source(workspace, source), source.model_dump(mode="json"))


def load_source(workspace: Workspace, source: Source) -> list[Problem]:
    """Load the problems of `source`; log its bad rows and leave them out."""
    if isinstance(source, StoredSource):
        return read_problems(workspace, source.version)
    logger = get_run_logger()
    loaded = load_problems(source, workspace.config.problems.max_bad_share)
    for row in loaded.bad[:_REPORTED]:
        logger.warning("%s: %s dropped: %s", source.kind, row.place, row.reason)
    if placeholders := sum(not row.counted for row in loaded.bad):
        logger.warning(
            "%s: %d rows dropped whose solutions are placeholders, such as `proof`", source.kind, placeholders
        )
    if len(loaded.bad) > _REPORTED:
        logger.warning("%s: %d more rows dropped", source.kind, len(loaded.bad) - _REPORTED)
    return loaded.problems


def commit_problems(workspace: Workspace, problems: Sequence[Problem], source: dict[str, object]) -> ProblemsVersion:
    """Commit a problem set, unless it exists, and return its version."""
    version = layout.problems(fingerprint(problems))
    if not manifests.committed(workspace.store, version):
        with Draft(workspace.store, version, "problems") as draft:
            write_rows(draft, PROBLEM_SCHEMA, problems, _ROWS_PER_SHARD)
            draft.commit(workspace.provenance(), [], {"problems": len(problems), "source": source})
    get_run_logger().info("%d problems: %s", len(problems), version)
    return version


def read_problems(workspace: Workspace, version: str) -> list[Problem]:
    """Read the problems of a stored set."""
    return [Problem(**row) for row in datasets.rows(workspace.store, version, workspace.cache)]
