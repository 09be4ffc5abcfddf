"""Search prompts, turns and feedback for text that should not be there."""

from collections.abc import Callable, Iterator
from typing import Any

from tasks.audit.checks.registry import AuditEvidence, Measured
from tasks.audit.flag_rows import flag_rows

TEXTS = """
    select 'problem' as unit, problem_id as id, null::integer as data_set, 'the prompt' as place, prompt as text
    from problems
    union all select 'turn', trajectory_id, data_set, 'turn ' || (turn + 1), text from turns
    union all select 'turn', trajectory_id, data_set, 'the feedback after turn ' || (turn + 1), feedback from turns
        where feedback <> ''"""
"""SQL: one row for each text and the place where it occurs."""
_BATCH = 4096


def search(evidence: AuditEvidence, check: str, pattern: str, kind: Callable[[str], str], what: str) -> Measured:
    """Count and flag the prompts, turns and pieces of feedback in which `kind` finds something.

    Args:
        evidence: the texts to search.
        check: name of the check.
        pattern: a regular expression for RE2, a first filter: `kind` is called only for texts that match it.
        kind: returns what the text contains, in words, or an empty string. It must not repeat a secret.
        what: what the check searches for, in words.
    """
    database = evidence.database
    database.connection.execute(
        f"""create or replace temp table matching as
        select unit, id, data_set, place, (hash(text) >> 1)::bigint as digest, text from ({TEXTS})
        where regexp_matches(text, ?)""",
        [pattern],
    )
    kinds = dict(_kinds(evidence, kind))
    rows: dict[str, list[Any]] = {"digest": list(kinds), "kind": list(kinds.values())}
    query = """select id, data_set, place || ' has what looks like ' || kind from matching join found using (digest)
        where unit = '{}'"""
    found = flag_rows(database, check, "problem", rows, query.format("problem"))
    found += flag_rows(database, check, "turn", rows, query.format("turn"))
    return measured(evidence, found, what)


def _kinds(evidence: AuditEvidence, kind: Callable[[str], str]) -> Iterator[tuple[int, str]]:
    """Yield the digest of each distinct matching text in which `kind` finds something, and what it finds."""
    distinct = evidence.database.connection.sql("select digest, any_value(text) from matching group by 1")
    for batch in distinct.to_arrow_reader(_BATCH):
        for digest, text in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            if name := kind(text):
                yield digest, name


def measured(evidence: AuditEvidence, found: int, what: str) -> Measured:
    """Return the measurement that `found` of all texts have `what`."""
    total = int(evidence.database.number(f"select count(*) from ({TEXTS})"))
    return Measured(found, total, f"{found:,} of {total:,} prompts, turns and pieces of feedback have {what}")
