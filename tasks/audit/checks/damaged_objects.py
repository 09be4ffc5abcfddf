"""Data objects that are not, byte for byte, what their manifests say; they are left out of everything else.

And objects among them that no manifest names, which nobody reads.
"""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check


def damaged_objects(evidence: AuditEvidence) -> Measured:
    """Counts the objects that `intake` could not take, and the strays."""
    intake = evidence.intake
    found = evidence.database.flag_all("damaged_objects", intake.damaged)
    strays = evidence.database.flag_all("damaged_objects", intake.strays)
    more = f"; {strays} lie among the data that no manifest names" if strays else ""
    gone = f"; the data of {len(intake.gone)} data sets were collected by gc" if intake.gone else ""
    says = f"{found} of {intake.objects} objects are missing or damaged{more}{gone}"
    return Measured(found + strays, intake.objects, says)


register_check("damaged_objects", "Damaged objects", "object", damaged_objects)
