"""Check for data objects that differ from their manifests, and for objects that no manifest names.

Damaged objects are left out of all other checks; objects that no manifest names are never read.
"""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check


def damaged_objects(evidence: AuditEvidence) -> Measured:
    """Count the damaged objects and the strays that `tasks.audit.intake` noted."""
    intake = evidence.intake
    found = evidence.database.flag_all("damaged_objects", intake.damaged)
    strays = evidence.database.flag_all("damaged_objects", intake.strays)
    more = f"; {strays} objects are named by no manifest" if strays else ""
    gone = f"; the data of {len(intake.collected)} data sets were collected by gc" if intake.collected else ""
    says = f"{found} of {intake.objects} objects are missing or damaged{more}{gone}"
    return Measured(found + strays, intake.objects, says)


register_check("damaged_objects", "Damaged objects", "object", damaged_objects)
