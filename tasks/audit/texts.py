"""All that was said, searched for what should not stand in it: prompts, turns and feedback."""

from collections.abc import Callable, Iterator
from typing import Any

from tasks.audit.checks.registry import AuditEvidence, Measured
from tasks.audit.found import flag_found

TEXTS = """
    select 'problem' as unit, problem_id as id, null::integer as data_set, 'the prompt' as place, prompt as text
    from problems
    union all select 'turn', trajectory_id, data_set, 'turn ' || (turn + 1), text from turns
    union all select 'turn', trajectory_id, data_set, 'the feedback after turn ' || (turn + 1), feedback from turns
        where feedback <> ''"""
"""SQL: each text, and where it stands."""
_BATCH = 4096


def search(evidence: AuditEvidence, check: str, pattern: str, kind: Callable[[str], str], what: str) -> Measured:
    """Counts the prompts, turns and pieces of feedback that hold something of some kind.

    Args:
        evidence: its texts are searched.
        check: its name.
        pattern: a regular expression of RE2, which texts without any of it do not match.
        kind: what a text that matches holds, in words; empty where it is nothing. It must not repeat a secret.
        what: is looked for, in words.
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
    found = flag_found(database, check, "problem", rows, query.format("problem"))
    found += flag_found(database, check, "turn", rows, query.format("turn"))
    return measured(evidence, found, what)


def _kinds(evidence: AuditEvidence, kind: Callable[[str], str]) -> Iterator[tuple[int, str]]:
    """Of each distinct text that holds something its digest, and what it is."""
    distinct = evidence.database.connection.sql("select digest, any_value(text) from matching group by 1")
    for batch in distinct.to_arrow_reader(_BATCH):
        for digest, text in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            if name := kind(text):
                yield digest, name


def measured(evidence: AuditEvidence, found: int, what: str) -> Measured:
    """Of all texts `found` have something."""
    looked_at = int(evidence.database.number(f"select count(*) from ({TEXTS})"))
    return Measured(found, looked_at, f"{found:,} of {looked_at:,} prompts, turns and pieces of feedback have {what}")
