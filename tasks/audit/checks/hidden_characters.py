"""Check for characters that reorder or hide text: people then read another text than the policy."""

from storage.visible import HIDDEN
from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.results import Unit
from tasks.audit.texts import TEXTS, measured


def hidden_characters(evidence: AuditEvidence) -> Measured:
    """Count prompts, turns and pieces of feedback with a character that `HIDDEN` matches."""
    units: tuple[Unit, ...] = ("problem", "turn")
    found = sum(
        evidence.database.flag(
            "hidden_characters",
            unit,
            f"""select id, data_set, place || ' has U+' || printf('%04X', unicode(regexp_extract(text, ?)))
            from ({TEXTS}) where unit = '{unit}' and regexp_matches(text, ?)""",
            HIDDEN,
            HIDDEN,
        )
        for unit in units
    )
    return measured(evidence, found, "characters that hide or reorder text")


register_check("hidden_characters", "Characters that hide text", "turn", hidden_characters)
