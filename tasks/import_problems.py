"""Task: import the problem sets once, as versions named by their fingerprints."""

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from configs.schema import Source
from storage import layout, manifests
from storage.drafts import Draft
from tasks.workspace import Workspace

_ROWS_PER_SHARD = 50_000
_REPORTED = 20


@task(name="import-problems", cache_policy=NO_CACHE)
def import_problems(workspace: Workspace) -> tuple[str, str]:
    """Versions of the training and the held-out problem sets.

    Raises:
        ProblemError: a source cannot be read, or too many of its rows are bad.
    """
    problems = workspace.config.problems
    return _import(workspace, problems.train), _import(workspace, problems.held_out)


def _import(workspace: Workspace, source: Source) -> str:
    from storage.datasets import write_rows
    from storage.records import PROBLEM_SCHEMA
    from tasks.problems import fingerprint, load_problems

    logger = get_run_logger()
    loaded = load_problems(source, workspace.config.problems.max_bad_share)
    for row in loaded.bad[:_REPORTED]:
        logger.warning("%s: line %d dropped: %s", source.kind, row.line, row.reason)
    if len(loaded.bad) > _REPORTED:
        logger.warning("%s: %d more rows dropped", source.kind, len(loaded.bad) - _REPORTED)
    version = layout.problems(fingerprint(loaded.problems))
    if not manifests.committed(workspace.store, version):
        with Draft(workspace.store, version, "problems") as draft:
            write_rows(draft, PROBLEM_SCHEMA, loaded.problems, _ROWS_PER_SHARD)
            metrics = {"problems": len(loaded.problems), "dropped": len(loaded.bad)}
            draft.commit(workspace.provenance(), [], metrics | {"source": source.model_dump(mode="json")})
    logger.info("%d problems from %s: %s", len(loaded.problems), source.kind, version)
    return version
