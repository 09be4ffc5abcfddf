"""Check for training problems that are also in an evaluation set of the run, whose accuracy then measures memory."""

from collections.abc import Iterable, Sequence

from storage import layout
from storage.errors import DamagedError
from storage.logs import catalog
from storage.records import Problem
from storage.version_names import EvaluationVersion, ProblemsVersion, select
from storage.versions import manifests
from storage.versions.datasets import rows as read_rows
from tasks.audit.checks.registry import AuditEvidence, Measured, SkippedError, register_check
from tasks.audit.flag_rows import flag_rows
from tasks.problems.contamination import find_overlaps


def contamination(evidence: AuditEvidence) -> Measured:
    """Compare the training problems of each run with the problem sets of its committed evaluations."""
    trained = {run: _trained_problems(evidence, run) for run in _runs(evidence)}
    sets = _evaluation_sets(evidence, [run for run, problems in trained.items() if problems])
    if not any(sets.values()):
        raise SkippedError("no run among the data sets has both training problems and evaluations to compare them with")
    found: dict[tuple[str, str], str] = {}
    for run, names in sets.items():
        for overlap in find_overlaps(trained[run], {name: list(_read_problems(evidence, name)) for name in names}):
            match = f"{overlap.other_id} of {overlap.set_name}, which {run} is evaluated on"
            found[run, overlap.problem_id] = f'is {match} ({overlap.kind}): "{overlap.shared}"'
    flag_rows(
        evidence.database,
        "contamination",
        "problem",
        {"id": [name for _, name in found], "detail": list(found.values())},
        "select id, null::integer, detail from found",
    )
    problems = sum(len(trained[run]) for run, names in sets.items() if names)
    compared = ", ".join(sorted({name for names in sets.values() for name in names}))
    return Measured(len(found), problems, f"{len(found):,} of {problems:,} training problems are also in {compared}")


def _runs(evidence: AuditEvidence) -> list[str]:
    return [
        run for (run,) in evidence.database.all("select distinct run from data_sets where not evaluation order by 1")
    ]


def _trained_problems(evidence: AuditEvidence, run: str) -> list[Problem]:
    rows = evidence.database.all(
        """select distinct problem_id, prompt, solutions from trajectories join data_sets d using (data_set)
        where d.run = ? and not evaluation order by all""",
        run,
    )
    return [Problem(name, prompt, solutions) for name, prompt, solutions in rows]


def _evaluation_sets(evidence: AuditEvidence, runs: Sequence[str]) -> dict[str, list[str]]:
    """Return for each run the problem sets that its policies were evaluated on and that gc has not collected."""
    sets: dict[str, dict[str, None]] = {run: {} for run in runs}
    for entry in catalog.read_all(evidence.store):
        run = layout.run_of(entry.version)
        if entry.kind == "evaluation" and run in sets:
            sets[run] |= dict.fromkeys(_problem_sets(evidence, EvaluationVersion(entry.version)))
    gone = {name for names in sets.values() for name in names if evidence.store.exists(layout.tombstone(name))}
    return {run: [name for name in names if name not in gone] for run, names in sets.items()}


def _problem_sets(evidence: AuditEvidence, evaluation: EvaluationVersion) -> list[ProblemsVersion]:
    """Return the problem set of an evaluation; nothing if it was never committed.

    Nothing, too, if its manifest is damaged, which `storage verify` reports.
    """
    try:
        manifest = manifests.find(evidence.store, evaluation)
    except DamagedError:
        return []
    return select(ProblemsVersion, manifest.parent_names) if manifest else []


def _read_problems(evidence: AuditEvidence, version: str) -> Iterable[Problem]:
    try:
        for row in read_rows(evidence.store, version, evidence.cache, ["problem_id", "prompt", "solutions"]):
            yield Problem(**row)
    except DamagedError as error:
        raise SkippedError(f"an evaluation set cannot be read: {error}") from error


register_check("contamination", "Training problems in evaluation sets", "problem", contamination)
