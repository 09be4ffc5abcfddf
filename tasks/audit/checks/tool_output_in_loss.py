"""Check for outputs of tools among the sampled tokens: the policy is then trained to invent what tools say.

This pipeline cannot write such rows. Other writers do if they take all tokens after the prompt for one completion, make
each message a turn, or forget the outputs in the mask.
"""

import re
from collections.abc import Iterable
from typing import Any

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.checks.shares import CALL
from tasks.audit.flag_rows import flag_rows
from tasks.audit.prompts import BETWEEN, SAMPLED
from tasks.audit.tokens import Decoder, Decoders

_AROUND = r"""(?:^|$|[\n<>\[\]|"])"""
"""Texts that templates write around an output: marks, quotes, or the begin and the end of a line."""


def tool_output_in_loss(evidence: AuditEvidence) -> Measured:
    """Count calls whose output is in no tokens that a following turn was given, but stands alone among action tokens.

    An output that is nowhere in the tokens is the matter of `template_drift`. What the policy itself wrote in the form
    of an output is no case: then the true one was given, too.
    """
    decoders = Decoders(evidence)
    calls = int(evidence.database.number(f"select count(*) from ({_ANSWERED})"))
    found = _flag(evidence, _trained(evidence, decoders, _lacking(evidence, decoders)))
    says = f"the outputs of {found:,} of {calls:,} calls with outputs that were checked stand among the sampled tokens"
    return Measured(found, calls, says + decoders.remark)


def _lacking(evidence: AuditEvidence, decoders: Decoders) -> dict[str, list[Any]]:
    """Return the distinct given tokens, by data set and digest, that lack an output."""
    query = (
        f"select data_set, output, digest, any_value(given) as ids from ({_GIVEN}) group by data_set, output, digest"
    )
    rows = [
        row
        for part in decoders.decode(evidence, query, special=True)
        for row, text in zip(part.columns("data_set", "output", "digest"), part.texts, strict=True)
        if not decoders.runs[part.run].shows(text, row["output"])
    ]
    return {name: [row[name] for row in rows] for name in ("data_set", "output", "digest")}


def _trained(evidence: AuditEvidence, decoders: Decoders, lacking: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Return the calls whose output stands among the action tokens from their turn to the end of the next."""
    connection = evidence.database.connection
    types = "data_set integer, output varchar, digest bigint"
    connection.execute(f"create or replace temp table lacking ({types})")
    evidence.database.insert("lacking", list(zip(*lacking.values(), strict=True)))
    return [
        row
        for part in decoders.decode(evidence, _ACTIONS, special=True)
        for row, text in zip(part.columns("row", "turn", "number", "output"), part.texts, strict=True)
        if _stands_alone(row["output"], text, decoders.runs[part.run])
    ]


def _stands_alone(output: str, text: str, decoder: Decoder) -> bool:
    return stands_alone(decoder.spellings(output.strip()), text)


def stands_alone(spellings: Iterable[str], text: str) -> bool:
    r"""Return whether a text has one of the spellings between marks that templates write.

    >>> stands_alone(["19"], "so <tool> 19\n"), stands_alone(["19"], "so 19")
    (True, False)
    """
    either = "|".join(re.escape(_with_short_blanks(each)) for each in spellings)
    return re.search(rf"{_AROUND}\s?(?:{either})\s?{_AROUND}", _with_short_blanks(text)) is not None


def _with_short_blanks(text: str) -> str:
    """Write one blank or line break for several: patterns with runs of blanks would take quadratic time."""
    return re.sub(r"\s+", lambda blanks: "\n" if "\n" in blanks[0] else " ", text)


def _flag(evidence: AuditEvidence, calls: list[dict[str, Any]]) -> int:
    return flag_rows(
        evidence.database,
        "tool_output_in_loss",
        "call",
        {name: [call[name] for call in calls] for name in ("row", "turn", "number")},
        f"""select trajectory_id, data_set, {CALL} || ': its output is among the sampled tokens: "'
            || left(output, 80) || '"'
        from calls join found using (row, turn, number)""",
    )


_ANSWERED = f"""
    select * from calls where regexp_matches(output, '\\S')
    and row in (select row from trajectories where len(action_mask) = len(token_ids) and {SAMPLED})"""

_GIVEN = f"""
    select c.data_set, c.row, c.turn, c.number, c.output, b.given, (hash(b.given) >> 1)::bigint as digest
    from ({_ANSWERED}) c join ({BETWEEN}) b on b.row = c.row and b.turn = c.turn"""

# The action tokens from a call's turn to the end of the turn after it in the sequence, or of the sequence.
_ACTIONS = f"""
    with shown as (
        select distinct row, turn, number from ({_GIVEN}) anti join lacking using (data_set, output, digest)
    )
    select data_set, row, turn, number, output, list_where(
        token_ids[begin + 1 : until], list_transform(action_mask[begin + 1 : until], lambda m: coalesce(m, false))
    ) as ids from (
        select *, if(turns[turn + 2]."end" <= rest, turns[turn + 2]."end", rest) as until from (
            select c.*, token_ids, action_mask, turns, turns[c.turn + 1]."start"::bigint as begin, coalesce(
                list_min(list_filter(sequence_starts, lambda s: s > turns[c.turn + 1]."start")), len(token_ids)) as rest
            from (({_ANSWERED}) anti join shown using (row, turn, number)) c
            join (select row, token_ids, action_mask, turns, sequence_starts from trajectories) using (row)
        )
    ) where begin >= 0"""

register_check("tool_output_in_loss", "Outputs of tools in the loss", "call", tool_output_in_loss, needs_calls=True)
