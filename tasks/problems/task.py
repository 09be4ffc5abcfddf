"""Tasks: import problem sets once, as versions named by their fingerprints, and keep them apart."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from configs.schema import HELD_OUT, Source, StoredSource
from storage import layout
from storage.errors import DamagedError
from storage.version_names import ProblemsVersion
from storage.versions import manifests
from storage.versions.drafts import Draft
from tasks.problems.curriculum_task import plan_curriculum
from tasks.run.workspace import Workspace

if TYPE_CHECKING:
    from storage.records import Problem

_ROWS_PER_SHARD = 50_000
_REPORTED = 20


@task(name="import-problems", cache_policy=NO_CACHE)
def import_problems(workspace: Workspace) -> tuple[ProblemsVersion, ProblemsVersion]:
    """Versions of the training and the held-out problem sets; training problems that are held out are reported.

    Where `problems.sampling` goes by the runs before, the run's curriculum is committed, too.

    Raises:
        ProblemError: a source cannot be read, or too many of its rows are bad.
        StorageError: a stored set is not there.
    """
    from tasks.problems.contamination import describe, find_overlaps

    problems = workspace.config.problems
    train, held_out = (import_source(workspace, source) for source in (problems.train, problems.held_out))
    if overlaps := find_overlaps(read_problems(workspace, train), {HELD_OUT: read_problems(workspace, held_out)}):
        get_run_logger().warning("%s", describe(overlaps))
    plan_curriculum(workspace, train)
    return train, held_out


@task(name="import-sets", cache_policy=NO_CACHE)
def import_sets(workspace: Workspace, names: Sequence[str] = ()) -> dict[str, ProblemsVersion]:
    """Versions of the evaluation sets by their names; of all of them unless `names` are given.

    Raises:
        ValueError: there is no set of that name.
        ProblemError, StorageError: see `import_problems`.
    """
    sources = {HELD_OUT: workspace.config.problems.held_out} | workspace.config.evaluation.sets
    if strange := [name for name in names if name not in sources]:
        raise ValueError(f"there is no evaluation set {strange[0]!r}; there are {', '.join(sources)}")
    return {name: import_source(workspace, sources[name]) for name in names or sources}


def import_source(workspace: Workspace, source: Source) -> ProblemsVersion:
    """The version of the problems of `source`."""
    if isinstance(source, StoredSource):
        if manifests.read(workspace.store, source.version).kind != "problems":
            raise DamagedError(f"{source.version} is not a problem set")
        return ProblemsVersion(source.version)
    return commit_problems(workspace, load_source(workspace, source), source.model_dump(mode="json"))


def load_source(workspace: Workspace, source: Source) -> "list[Problem]":
    """The problems of `source`; its bad rows are told and left out."""
    from tasks.problems import load_problems

    if isinstance(source, StoredSource):
        return read_problems(workspace, source.version)
    logger = get_run_logger()
    loaded = load_problems(source, workspace.config.problems.max_bad_share)
    for row in loaded.bad[:_REPORTED]:
        logger.warning("%s: %s dropped: %s", source.kind, row.place, row.reason)
    if len(loaded.bad) > _REPORTED:
        logger.warning("%s: %d more rows dropped", source.kind, len(loaded.bad) - _REPORTED)
    return loaded.problems


def commit_problems(workspace: Workspace, problems: "Sequence[Problem]", source: dict[str, object]) -> ProblemsVersion:
    """The version of a problem set; written where it is new."""
    from storage.records import PROBLEM_SCHEMA
    from storage.versions.datasets import write_rows
    from tasks.problems import fingerprint

    version = layout.problems(fingerprint(problems))
    if not manifests.committed(workspace.store, version):
        with Draft(workspace.store, version, "problems") as draft:
            write_rows(draft, PROBLEM_SCHEMA, problems, _ROWS_PER_SHARD)
            draft.commit(workspace.provenance(), [], {"problems": len(problems), "source": source})
    get_run_logger().info("%d problems: %s", len(problems), version)
    return version


def read_problems(workspace: Workspace, version: str) -> "list[Problem]":
    """The rows of a problem set."""
    from storage.records import Problem
    from storage.versions import datasets

    return [Problem(**row) for row in datasets.rows(workspace.store, version, workspace.cache)]
