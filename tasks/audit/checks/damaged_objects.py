"""Data objects that are not, byte for byte, what their manifests say; they are left out of everything else."""

from tasks.audit.checks.registry import Evidence, Measured, register_check


def damaged_objects(evidence: Evidence) -> Measured:
    """Counts the objects that `intake` could not take."""
    intake = evidence.intake
    found = evidence.database.flag_all("damaged_objects", intake.damaged)
    gone = f"; the data of {len(intake.gone)} data sets were collected by gc" if intake.gone else ""
    return Measured(found, intake.objects, f"{found} of {intake.objects} objects are missing or damaged{gone}")


register_check("damaged_objects", "Damaged objects", "object", damaged_objects)
