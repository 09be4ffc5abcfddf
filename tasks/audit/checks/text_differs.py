"""Turns whose tokens say another thing than their text: what was judged is not what is trained on."""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.found import flag_found
from tasks.audit.tokens import Decoded, Decoders

MOST_TOKENS = 200_000_000
"""Of turns that are decoded; of more a sample of the turns is looked at. Five million take a second."""
_SHOWN = 80  # characters
_NAMES = ("trajectory_id", "data_set", "turn")


def text_differs(evidence: AuditEvidence) -> Measured:
    """Decodes the tokens of every turn, without special tokens, as the rollout did."""
    decoders, turns = Decoders(evidence), int(evidence.database.number("select count(*) from turns"))
    seen, differing = 0, list[pa.RecordBatch]()
    for part in decoders.decode(evidence, _turns(evidence)):
        seen += part.rows.num_rows
        differing.append(_differing(part))
    found = _flag(evidence, [batch for batch in differing if batch.num_rows])
    looked_at = f"{turns:,} turns" if seen == turns else f"the {seen:,} of {turns:,} turns that were decoded"
    return Measured(found, seen, f"{found:,} of {looked_at} have other tokens than text{decoders.remark}")


def _turns(evidence: AuditEvidence) -> str:
    """All turns, or those whose hash is small enough."""
    tokens = evidence.database.number("select sum(sampled) from episodes")
    chosen = "true" if tokens <= MOST_TOKENS else f"hash(row, turn) % 1000000 < {1e6 * MOST_TOKENS / tokens:.0f}"
    return f"""
        select data_set, trajectory_id, turn, t.text as text, token_ids[t."start"::bigint + 1 : t."end"] as ids
        from (
            select data_set, row, trajectory_id, token_ids, unnest(turns) as t,
                generate_subscripts(turns, 1) - 1 as turn
            from trajectories
        ) where {chosen}"""


def _differing(part: Decoded) -> pa.RecordBatch:
    columns: dict[str, Any] = {name: part.rows.column(name) for name in (*_NAMES, "text")}
    told = pa.RecordBatch.from_pydict({**columns, "decoded": pa.array(part.texts, pa.string())})
    differing = told.filter(pc.not_equal(told.column("text"), told.column("decoded")))
    shown = [pc.utf8_slice_codeunits(differing.column(name), 0, _SHOWN) for name in ("text", "decoded")]
    return pa.RecordBatch.from_pydict(
        {**{name: differing.column(name) for name in _NAMES}, "text": shown[0], "decoded": shown[1]}
    )


def _flag(evidence: AuditEvidence, differing: list[pa.RecordBatch]) -> int:
    if not differing:
        return 0
    return flag_found(
        evidence.database,
        "text_differs",
        "turn",
        pa.Table.from_batches(differing),
        """select trajectory_id, data_set,
            'turn ' || (turn + 1) || ': its tokens say "' || decoded || '", its text "' || text || '"' from found""",
    )


register_check("text_differs", "Text that differs from its tokens", "turn", text_differs)
