"""Check the prompt template: prompts built in another way than most of their run, or without the feedback.

The form of a prompt is its decoded text with a mark in the place of the problem's text.
Example: the prompt "<user>What is 1 + 1?<end>" of the problem "What is 1 + 1?" has the form "<user>⟨problem⟩<end>".
"""

import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.flag_rows import flag_rows
from tasks.audit.prompts import BETWEEN, PROMPTS, create_distinct_prompts
from tasks.audit.tokens import Decoder, Decoders

_MARK = "⟨problem⟩"
_WITHOUT = "(without the problem's text)"
_MANY = 8  # forms
_SHOWN = 30  # characters before the place where two forms begin to differ, and twice as many after it


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A distinct prompt of a problem, and its form: the text around the problem's text."""

    run: str
    prompt: str  # the problem's
    digest: int
    form: str
    episodes: int


def template_drift(evidence: AuditEvidence) -> Measured:
    """Count forms besides the most frequent one of a run, and turns whose feedback is not in the tokens that follow.

    The prompts of agents that begin several conversations in an episode are not compared: the agent wrote them.
    """
    decoders = Decoders(evidence)
    prompts = _distinct_prompts(evidence, decoders)
    forms = _forms(prompts)
    prompts = [each for each in prompts if each.run in forms]
    usual = {run: counts.most_common(1)[0][0] for run, counts in forms.items()}
    beyond = sum(len(counts) - 1 for counts in forms.values())
    rows = _flag_prompts(evidence, [each for each in prompts if each.form != usual[each.run]], usual)
    pieces, lacking = _pieces(evidence, decoders)
    turns = _flag_pieces(evidence, lacking)
    says = (
        f"{beyond} forms of the prompt besides the usual one, in {rows:,} trajectories; {len(prompts):,} distinct "
        f"prompts were checked. The feedback after {turns:,} turns is not in the tokens that follow; {pieces:,} "
        "distinct pieces were checked"
    )
    return Measured(beyond + turns, len(prompts), says + decoders.remark)


def _forms(prompts: list[_Prompt]) -> dict[str, Counter[str]]:
    """Count for each run the episodes with each form.

    Runs with many forms and no majority are left out, because they vary their prompts on purpose.
    """
    forms: dict[str, Counter[str]] = {}
    for each in prompts:
        forms.setdefault(each.run, Counter())[each.form] += each.episodes
    return {
        run: counts
        for run, counts in forms.items()
        if len(counts) <= _MANY or 2 * max(counts.values()) > counts.total()
    }


def _distinct_prompts(evidence: AuditEvidence, decoders: Decoders) -> list[_Prompt]:
    create_distinct_prompts(evidence)
    query = "select data_set, digest, prompt, episodes, ids from distinct_prompts order by number"
    return [
        _Prompt(part.run, row["prompt"], row["digest"], sys.intern(form), row["episodes"])
        for part in decoders.decode(evidence, query, special=True)
        for row, text in zip(part.columns("digest", "prompt", "episodes"), part.texts, strict=True)
        for form in [_form(text, row["prompt"], decoders.runs[part.run])]
    ]


def _form(text: str, words: str, decoder: Decoder) -> str:
    """Replace `words`, which templates may trim and tokenizers may normalise, by a mark in `text`."""
    words = words.strip()
    if words not in text:
        words = decoder.round_trip(words)
    return _MARK.join(text.rsplit(words, 1)) if words and words in text else _WITHOUT


def _flag_prompts(evidence: AuditEvidence, unusual: list[_Prompt], usual: dict[str, str]) -> int:
    """Flag all trajectories with one of the `unusual` prompts; return their number."""
    rows: dict[str, list[Any]] = {
        "run": [each.run for each in unusual],
        "prompt": [each.prompt for each in unusual],
        "digest": [each.digest for each in unusual],
        "detail": [_describe_difference(each.form, usual[each.run]) for each in unusual],
    }
    return flag_rows(
        evidence.database,
        "template_drift",
        "trajectory",
        rows,
        f"""select t.trajectory_id, t.data_set, o.detail
        from ({PROMPTS}) t join data_sets d using (data_set)
        join (select run, prompt, digest, min(detail) as detail from found group by all) o
            on o.run = d.run and o.prompt = t.prompt and o.digest = t.digest""",
    )


def _describe_difference(form: str, usual: str) -> str:
    """Show both forms around the first place where they differ."""
    pairs = enumerate(zip(form, usual, strict=False))
    place = next((place for place, (one, other) in pairs if one != other), min(len(form), len(usual)))
    place = 0 if _WITHOUT in (form, usual) else place
    return f"its prompt has {_around(form, place)} where most of its run have {_around(usual, place)}"


def _around(text: str, place: int) -> str:
    return repr(text[max(0, place - _SHOWN) : place + 2 * _SHOWN])


_Piece = tuple[str, str, int]
"""Run, feedback, and digest of the tokens that should contain the feedback."""


def _pieces(evidence: AuditEvidence, decoders: Decoders) -> tuple[int, list[_Piece]]:
    """Return the number of distinct pieces before turns that follow, and those pieces that lack the feedback."""
    query = f"""select data_set, feedback, digest, any_value(ids) as ids from ({BETWEEN}) where trim(feedback) <> ''
        group by data_set, feedback, digest"""
    pieces, lacking = 0, list[_Piece]()
    for part in decoders.decode(evidence, query, special=True):
        for row, text in zip(part.columns("feedback", "digest"), part.texts, strict=True):
            pieces += 1
            if not decoders.runs[part.run].shows(text, row["feedback"]):
                lacking.append((part.run, row["feedback"], row["digest"]))
    return pieces, list(dict.fromkeys(lacking))


def _flag_pieces(evidence: AuditEvidence, lacking: list[_Piece]) -> int:
    """Flag the turns whose feedback none of the turns that follow them was given: branches are given other texts."""
    runs, feedback, digests = zip(*lacking, strict=True) if lacking else ((), (), ())
    return flag_rows(
        evidence.database,
        "template_drift",
        "turn",
        {"run": runs, "feedback": feedback, "digest": digests},
        f"""select any_value(p.trajectory_id), p.data_set,
            'the tokens after turn ' || (p.turn + 1) || ' do not contain its feedback: "' || left(p.feedback, 80) || '"'
        from ({BETWEEN}) p join data_sets d using (data_set)
        left join found f on f.run = d.run and f.feedback = p.feedback and f.digest = p.digest
        group by p.row, p.data_set, p.turn, p.feedback having count(*) = count(f.digest)""",
    )


register_check("template_drift", "Drift of the prompt's form", "trajectory", template_drift)
