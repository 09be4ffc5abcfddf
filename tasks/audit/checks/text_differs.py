"""Check for turns whose tokens decode to another text than the stored one: the graded text is not the trained one."""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.flag_rows import flag_rows
from tasks.audit.tokens import Decoded, Decoder, Decoders, lists

MOST_TOKENS = 200_000_000
"""The most sampled tokens that are decoded; with more, only a sample of the turns is. Five million take a second."""
_SHOWN = 80  # characters
_NAMES = ("trajectory_id", "data_set", "turn")


def text_differs(evidence: AuditEvidence) -> Measured:
    """Decode the tokens of every turn, without special tokens like the rollout, and count turns with another text."""
    decoders, turns = Decoders(evidence), int(evidence.database.number("select count(*) from turns"))
    decoded, differing = 0, list[pa.RecordBatch]()
    for part in decoders.decode(evidence, _turns(evidence)):
        decoded += part.rows.num_rows
        differing.append(_differing(part, decoders.runs[part.run]))
    found = _flag(evidence, [batch for batch in differing if batch.num_rows])
    checked = f"{turns:,} turns" if decoded == turns else f"the {decoded:,} of {turns:,} turns that were decoded"
    return Measured(found, decoded, f"{found:,} of {checked} have tokens that differ from their text{decoders.remark}")


def _turns(evidence: AuditEvidence) -> str:
    """Return a query of all turns, or of a sample by hash."""
    tokens = evidence.database.number("select sum(sampled) from episodes")
    chosen = "true" if tokens <= MOST_TOKENS else f"hash(row, turn) % 1000000 < {1e6 * MOST_TOKENS / tokens:.0f}"
    return f"""
        select data_set, trajectory_id, turn, t.text as text, token_ids[t."start"::bigint + 1 : t."end"] as ids
        from (
            select data_set, row, trajectory_id, token_ids, unnest(turns) as t,
                generate_subscripts(turns, 1) - 1 as turn
            from trajectories
        ) where {chosen}"""


def _differing(part: Decoded, decoder: Decoder) -> pa.RecordBatch:
    columns: dict[str, Any] = {name: part.rows.column(name) for name in (*_NAMES, "text", "ids")}
    both = pa.RecordBatch.from_pydict({**columns, "decoded": pa.array(part.texts, pa.string())})
    differing = both.filter(pc.not_equal(both.column("text"), both.column("decoded")))
    unended = pa.array(decoder.unended(lists(differing.column("ids"))), pa.string())
    differing = differing.filter(pc.not_equal(differing.column("text"), unended))
    shown = [pc.utf8_slice_codeunits(differing.column(name), 0, _SHOWN) for name in ("text", "decoded")]
    return pa.RecordBatch.from_pydict(
        {**{name: differing.column(name) for name in _NAMES}, "text": shown[0], "decoded": shown[1]}
    )


def _flag(evidence: AuditEvidence, differing: list[pa.RecordBatch]) -> int:
    if not differing:
        return 0
    return flag_rows(
        evidence.database,
        "text_differs",
        "turn",
        pa.Table.from_batches(differing),
        """select trajectory_id, data_set,
            'turn ' || (turn + 1) || ': its tokens say "' || decoded || '", its text "' || text || '"' from found""",
    )


register_check("text_differs", "Text that differs from its tokens", "turn", text_differs)
