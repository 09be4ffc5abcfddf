"""Training problems that stand in an evaluation set of the run, too: its accuracy is remembered, not earned."""

from collections.abc import Iterable, Sequence

from storage import layout
from storage.errors import DamagedError
from storage.logs import catalog
from storage.records import Problem
from storage.version_names import EvaluationVersion, ProblemsVersion, select
from storage.versions import manifests
from storage.versions.datasets import rows
from tasks.audit.checks.registry import AuditEvidence, Measured, SkippedError, register_check
from tasks.audit.found import flag_found
from tasks.problems.contamination import find_overlaps


def contamination(evidence: AuditEvidence) -> Measured:
    """Compares what each run was trained on with the problem sets of its committed evaluations."""
    trained = {run: _trained(evidence, run) for run in _runs(evidence)}
    sets = _evaluated(evidence, [run for run, problems in trained.items() if problems])
    if not any(sets.values()):
        raise SkippedError("no training data set of a run with evaluations, whose problems could be compared")
    found: dict[tuple[str, str], str] = {}
    for run, names in sets.items():
        for overlap in find_overlaps(trained[run], {name: list(_read(evidence, name)) for name in names}):
            place = f"{overlap.other_id} of {overlap.set_name}, which {run} is evaluated on"
            found[run, overlap.problem_id] = f'is {place} ({overlap.kind}): "{overlap.shared}"'
    flag_found(
        evidence.database,
        "contamination",
        "problem",
        {"id": [name for _, name in found], "detail": list(found.values())},
        "select id, null::integer, detail from found",
    )
    problems = sum(len(trained[run]) for run, names in sets.items() if names)
    held = ", ".join(sorted({name for names in sets.values() for name in names}))
    return Measured(len(found), problems, f"{len(found):,} of {problems:,} training problems stand in {held}, too")


def _runs(evidence: AuditEvidence) -> list[str]:
    return [
        run for (run,) in evidence.database.all("select distinct run from data_sets where not evaluation order by 1")
    ]


def _trained(evidence: AuditEvidence, run: str) -> list[Problem]:
    found = evidence.database.all(
        """select distinct problem_id, prompt, solutions from trajectories join data_sets d using (data_set)
        where d.run = ? and not evaluation order by all""",
        run,
    )
    return [Problem(name, prompt, solutions) for name, prompt, solutions in found]


def _evaluated(evidence: AuditEvidence, runs: Sequence[str]) -> dict[str, list[str]]:
    """By run the versions of the problem sets that its policies were evaluated on, as far as they are there."""
    found: dict[str, dict[str, None]] = {run: {} for run in runs}
    for entry in catalog.read_all(evidence.store):
        run = layout.run_of(entry.version)
        if entry.kind == "evaluation" and run in found:
            found[run] |= dict.fromkeys(_parents(evidence, EvaluationVersion(entry.version)))
    gone = {name for names in found.values() for name in names if evidence.store.exists(layout.tombstone(name))}
    return {run: [name for name in names if name not in gone] for run, names in found.items()}


def _parents(evidence: AuditEvidence, evaluation: EvaluationVersion) -> list[ProblemsVersion]:
    """Its problem set; nothing where it was not committed. What is damaged is for `storage verify` to tell."""
    try:
        manifest = manifests.find(evidence.store, evaluation)
    except DamagedError:
        return []
    return select(ProblemsVersion, manifest.parent_names) if manifest else []


def _read(evidence: AuditEvidence, version: str) -> Iterable[Problem]:
    try:
        for row in rows(evidence.store, version, evidence.cache, ["problem_id", "prompt", "solutions"]):
            yield Problem(**row)
    except DamagedError as error:
        raise SkippedError(f"an evaluation set cannot be read: {error}") from error


register_check("contamination", "Training problems in evaluation sets", "problem", contamination)
