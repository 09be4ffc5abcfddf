"""Checks of the store: objects, schemas and parents. `verdicts.sql` has those of scores that are missing."""

from tasks.audit.checks import AuditEvidence, Measured, check


@check("damaged_objects", "object", needs="nothing")
def damaged_objects(evidence: AuditEvidence) -> Measured:
    """Count the objects that differ from their manifests, and those that no manifest names (`tasks.tables.sets`).

    Damaged objects are left out of all other checks; objects that no manifest names are never read.
    """
    intake = evidence.intake
    found = evidence.database.flag_all("damaged_objects", intake.damaged)
    strays = evidence.database.flag_all("damaged_objects", intake.strays)
    more = f"; {strays} objects are named by no manifest" if strays else ""
    gone = f"; the data of {len(intake.collected)} data sets were collected by gc" if intake.collected else ""
    says = f"{found} of {intake.objects} objects are missing or damaged{more}{gone}"
    return Measured(found + strays, intake.objects, says)


@check("wrong_schema", "object", needs="nothing")
def wrong_schema(evidence: AuditEvidence) -> Measured:
    """Count files that are not Parquet, or have a newer or another schema. They are left out of all other checks."""
    found, of = evidence.database.flag_all("wrong_schema", evidence.intake.foreign), evidence.intake.objects
    return Measured(found, of, f"{found} of {of} files have an unknown schema")


@check("broken_parents", "object", needs="nothing")
def broken_parents(evidence: AuditEvidence) -> Measured:
    """Count parents whose manifest is missing or has another hash, and rows that name another policy or problem set."""
    orphaned = evidence.database.flag_all("broken_parents", evidence.intake.orphaned)
    mismatched = evidence.database.flag("broken_parents", "trajectory", "from other_parents")
    parents = evidence.intake.parents
    says = f"{orphaned} of {parents} parents are missing or changed; {mismatched} rows name other parents"
    return Measured(orphaned + mismatched, parents, says)
