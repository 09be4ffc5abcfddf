"""Checks that decode stored tokens: the form of prompts, and texts against the tokens that stand for them.

The form of a prompt is its decoded text with a mark instead of the problem's text.
Example: the prompt "<user>What is 1 + 1?<end>" of the problem "What is 1 + 1?" has the form "<user>⟨problem⟩<end>".
"""

import sys
from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tasks.audit.checks import AuditEvidence, Measured, check
from tasks.audit.decoding import Decoded, Decoder, Decoders, lists
from tasks.thoughts import TAG


def create_distinct_prompts(evidence: AuditEvidence) -> None:
    """Create the table `distinct_prompts`, unless it exists.

    It has one row for each distinct prompt of each problem of a run: number, run, data_set (the first), problem_id,
    prompt, solutions (the problem's), digest, ids (token ids before the first turn), episodes (with this prompt).
    """
    evidence.database.connection.execute(
        """create temp table if not exists distinct_prompts as
        select row_number() over (order by data_set, problem_id, prompt, digest) as number, * from (
            select run, min(data_set) as data_set, problem_id, prompt, solutions, digest, arg_min(ids, row) as ids,
                count(*) as episodes
            from prompts_given p join (select data_set, run from data_sets) using (data_set)
            group by run, problem_id, prompt, solutions, digest
        )"""
    )


_SHOWN = 80  # characters


@check("text_differs", "turn", needs="tokens")
def text_differs(evidence: AuditEvidence) -> Measured:
    """Decode the tokens of every turn, without special tokens like the rollout, and count turns with another text.

    The graded text is then not the trained one. Five million tokens take a second.
    """
    decoders, turns = Decoders(evidence), evidence.database.count("turns")
    query = "select data_set, trajectory_id, turn, t.text as text, ids from turn_tokens"
    decoded, differing = 0, list[pa.RecordBatch]()
    for batch in decoders.decode(evidence, query):
        decoded += batch.rows.num_rows
        differing.append(_differing(batch, decoders.runs[batch.run]))
    found = 0
    if differing:
        query = """select trajectory_id, data_set,
            turn_name(turn) || ': its tokens say "' || decoded || '", its text "' || text || '"' from found"""
        found = evidence.database.flag("text_differs", "turn", query, found=pa.Table.from_batches(differing))
    checked = f"{turns:,} turns" if decoded == turns else f"the {decoded:,} of {turns:,} turns that were decoded"
    return Measured(found, decoded, f"{found:,} of {checked} have tokens that differ from their text{decoders.remark}")


def _differing(batch: Decoded, decoder: Decoder) -> pa.RecordBatch:
    rows = batch.rows.append_column("decoded", pa.array(batch.texts, pa.string()))
    rows = rows.filter(pc.not_equal(rows["text"], rows["decoded"]))
    unended = pa.array(decoder.unended(lists(rows["ids"])), pa.string())
    rows = rows.filter(pc.not_equal(_without_tags(rows["text"]), _without_tags(unended)))
    names = ["trajectory_id", "data_set", "turn", "text", "decoded"]
    shown = [pc.utf8_slice_codeunits(rows[name], 0, _SHOWN) for name in names[3:]]
    return pa.RecordBatch.from_arrays([*(rows[name] for name in names[:3]), *shown], names)


def _without_tags(texts: Any) -> Any:
    """Remove the tags of thoughts, of which a prompt may have the first, and tokenizers call some special."""
    return pc.utf8_trim_whitespace(pc.replace_substring_regex(texts, f"(?i){TAG.pattern}", ""))


_MARK = "⟨problem⟩"
_WITHOUT = "(without the problem's text)"
_MANY = 8  # forms
_AROUND = 30  # characters before the position where two forms begin to differ, and twice as many after it


@check("template_drift", "trajectory", needs="tokens")
def template_drift(evidence: AuditEvidence) -> Measured:
    """Count forms besides the most frequent one of a run, and turns whose feedback is not in the tokens that follow.

    Each member of a mixture has its own form, because it may have its own agent. The prompts of agents that begin
    several conversations in an episode are not compared: the agent wrote them. Nor are those of runs with many forms
    and no majority, because they vary their prompts on purpose.
    """
    decoders = Decoders(evidence)
    create_distinct_prompts(evidence)
    query = "select data_set, digest, prompt, episodes, problem_id, ids from distinct_prompts order by number"
    members = _members(evidence)
    prompts = [
        row
        | {"run": batch.run, "of": _player(batch.run, row["problem_id"], members)}
        | {"form": sys.intern(_form(text, row["prompt"], decoders.runs[batch.run]))}
        for batch in decoders.decode(evidence, query, special=True)
        for row, text in batch.columns("digest", "prompt", "episodes", "problem_id")
    ]
    forms: dict[str, Counter[str]] = {}
    for each in prompts:
        forms.setdefault(each["of"], Counter())[each["form"]] += each["episodes"]
    forms = {of: each for of, each in forms.items() if len(each) <= _MANY or 2 * max(each.values()) > each.total()}
    prompts = [each for each in prompts if each["of"] in forms]
    usual = {of: counts.most_common(1)[0][0] for of, counts in forms.items()}
    beyond = sum(len(counts) - 1 for counts in forms.values())
    found = [
        {**each, "detail": _difference(each["form"], usual[each["of"]])}
        for each in prompts
        if each["form"] != usual[each["of"]]
    ]
    query = """select t.trajectory_id, t.data_set, o.detail
        from prompts_given t join data_sets d using (data_set)
        join (select run, prompt, digest, min(detail) as detail from found group by all) o
            on o.run = d.run and o.prompt = t.prompt and o.digest = t.digest"""
    rows = evidence.database.flag("template_drift", "trajectory", query, found=found)
    turns, pieces = _flag_feedback(evidence, decoders)
    says = (
        f"{beyond} forms of the prompt besides the usual one, in {rows:,} trajectories; {len(prompts):,} distinct "
        f"prompts were checked. The feedback after {turns:,} turns is not in the tokens that follow; {pieces:,} "
        "distinct pieces were checked"
    )
    return Measured(beyond + turns, len(prompts), says + decoders.remark)


def _members(evidence: AuditEvidence) -> dict[str, set[str]]:
    """Return the names of a mixture's members, by run."""
    found: dict[str, set[str]] = {}
    for each in evidence.data_sets:
        trained = each.manifest.knob("problems.train") if each.manifest else None
        if isinstance(trained, list):
            found.setdefault(each.run, set()).update(member["name"] for member in trained)
    return found


def _player(run: str, problem_id: str, members: dict[str, set[str]]) -> str:
    """Return the run or, for a problem of a mixture's member, run and member: its id begins with the member's name.

    >>> _player("demo-mix", "game/game1", {"demo-mix": {"game"}}), _player("demo", "game/game1", {})
    ('demo-mix/game', 'demo')
    """
    name = problem_id.partition("/")[0]
    return f"{run}/{name}" if name in members.get(run, ()) else run


def _form(text: str, words: str, decoder: Decoder) -> str:
    """Replace `words`, which templates may trim and tokenizers may normalise, by a mark in `text`."""
    words = words.strip()
    if words not in text:
        words = decoder.round_trip(words)
    return _MARK.join(text.rsplit(words, 1)) if words and words in text else _WITHOUT


def _difference(form: str, usual: str) -> str:
    """Show both forms around the first position where they differ."""
    pairs = enumerate(zip(form, usual, strict=False))
    position = next((position for position, (one, other) in pairs if one != other), min(len(form), len(usual)))
    position = 0 if _WITHOUT in (form, usual) else position
    shown, expected = (repr(text[max(0, position - _AROUND) : position + 2 * _AROUND]) for text in (form, usual))
    return f"its prompt has {shown} where most of its run have {expected}"


def _flag_feedback(evidence: AuditEvidence, decoders: Decoders) -> tuple[int, int]:
    """Flag the turns whose feedback none of the turns that follow them was given: branches are given other texts.

    Return the number of these turns, and that of the distinct pieces of tokens that were checked.
    """
    query = """select data_set, feedback, digest, any_value(ids) as ids from between_turns where trim(feedback) <> ''
        group by data_set, feedback, digest"""
    pieces, lacking = 0, dict[tuple[str, str, int], dict[str, Any]]()
    for batch in decoders.decode(evidence, query, special=True):
        for row, text in batch.columns("feedback", "digest"):
            pieces += 1
            if not decoders.runs[batch.run].shows(text, row["feedback"]):
                lacking[batch.run, row["feedback"], row["digest"]] = row | {"run": batch.run}
    query = """select any_value(p.trajectory_id), p.data_set,
            'the tokens after ' || turn_name(p.turn) || ' do not contain its feedback: "' || left(p.feedback, 80) || '"'
        from between_turns p join data_sets d using (data_set)
        left join found f on f.run = d.run and f.feedback = p.feedback and f.digest = p.digest
        group by p.row, p.data_set, p.turn, p.feedback having count(*) = count(f.digest)"""
    return evidence.database.flag("template_drift", "turn", query, found=[*lacking.values()]), pieces
