"""Prompts that are put together in another way than most of their run: the policy sees what it was not trained on."""

import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.found import flag_found
from tasks.audit.prompts import ASKED, BETWEEN, gather
from tasks.audit.tokens import Decoder, Decoders

_MARK = "⟨problem⟩"
_WITHOUT = "(without the problem's text)"
_MANY = 8  # forms
_SHOWN = 30  # characters before the place where two forms part, and twice as many after it


@dataclass(frozen=True, slots=True)
class _Asked:
    """A distinct prompt, and its form: what stands around the problem's text."""

    run: str
    prompt: str  # the problem's
    digest: int
    form: str
    episodes: int


def template_drift(evidence: AuditEvidence) -> Measured:
    """Counts forms beyond the most frequent one of a run, and pieces between turns that lack their feedback."""
    decoders = Decoders(evidence)
    asked = _asked(evidence, decoders)
    forms = _forms(asked)
    asked = [each for each in asked if each.run in forms]
    usual = {run: counts.most_common(1)[0][0] for run, counts in forms.items()}
    beyond = sum(len(counts) - 1 for counts in forms.values())
    rows = _flag_prompts(evidence, [each for each in asked if each.form != usual[each.run]], usual)
    pieces, lacking = _pieces(evidence, decoders)
    turns = _flag_pieces(evidence, lacking)
    says = (
        f"{beyond} forms of the prompt beyond the usual one, in {rows:,} trajectories; {len(asked):,} distinct prompts "
        f"were looked at. Of {pieces:,} distinct pieces between turns {len(lacking)} lack their feedback, in {turns:,} "
        "turns"
    )
    return Measured(beyond + len(lacking), len(asked), says + decoders.remark)


def _forms(asked: list[_Asked]) -> dict[str, Counter[str]]:
    """By run, how many episodes had which form; not of runs with many and none that is usual: they vary on purpose."""
    forms: dict[str, Counter[str]] = {}
    for each in asked:
        forms.setdefault(each.run, Counter())[each.form] += each.episodes
    return {
        run: counts
        for run, counts in forms.items()
        if len(counts) <= _MANY or 2 * max(counts.values()) > counts.total()
    }


def _asked(evidence: AuditEvidence, decoders: Decoders) -> list[_Asked]:
    gather(evidence)
    query = "select data_set, digest, prompt, episodes, ids from asked order by asked"
    return [
        _Asked(part.run, row["prompt"], row["digest"], sys.intern(form), row["episodes"])
        for part in decoders.decode(evidence, query, special=True)
        for row, text in zip(part.columns("digest", "prompt", "episodes"), part.texts, strict=True)
        for form in [_form(text, row["prompt"], decoders.runs[part.run])]
    ]


def _form(text: str, words: str, decoder: Decoder) -> str:
    """`text` with a mark for `words`, which templates may trim and tokenizers may normalise."""
    words = words.strip()
    if words not in text:
        words = decoder.round_trip(words)
    return _MARK.join(text.rsplit(words, 1)) if words and words in text else _WITHOUT


def _flag_prompts(evidence: AuditEvidence, odd: list[_Asked], usual: dict[str, str]) -> int:
    """All trajectories with one of these prompts."""
    rows: dict[str, list[Any]] = {
        "run": [each.run for each in odd],
        "prompt": [each.prompt for each in odd],
        "digest": [each.digest for each in odd],
        "detail": [_differing(each.form, usual[each.run]) for each in odd],
    }
    return flag_found(
        evidence.database,
        "template_drift",
        "trajectory",
        rows,
        f"""select t.trajectory_id, t.data_set, o.detail
        from ({ASKED}) t join data_sets d using (data_set)
        join (select run, prompt, digest, min(detail) as detail from found group by all) o
            on o.run = d.run and o.prompt = t.prompt and o.digest = t.digest""",
    )


def _differing(form: str, usual: str) -> str:
    """Where the two part."""
    pairs = enumerate(zip(form, usual, strict=False))
    place = next((place for place, (one, other) in pairs if one != other), min(len(form), len(usual)))
    place = 0 if _WITHOUT in (form, usual) else place
    return f"its prompt has {_around(form, place)} where most of its run have {_around(usual, place)}"


def _around(text: str, place: int) -> str:
    return repr(text[max(0, place - _SHOWN) : place + 2 * _SHOWN])


_Piece = tuple[str, str, int]
"""Run, feedback, and digest of the tokens that should give it."""


def _pieces(evidence: AuditEvidence, decoders: Decoders) -> tuple[int, list[_Piece]]:
    """How many distinct pieces stand between turns, and those that lack the feedback."""
    query = (
        f"select data_set, feedback, digest, any_value(ids) as ids from ({BETWEEN}) group by data_set, feedback, digest"
    )
    pieces, lacking = 0, list[_Piece]()
    for part in decoders.decode(evidence, query, special=True):
        for row, text in zip(part.columns("feedback", "digest"), part.texts, strict=True):
            pieces += 1
            told = row["feedback"].strip()
            if told and _form(text, told, decoders.runs[part.run]) == _WITHOUT:
                lacking.append((part.run, row["feedback"], row["digest"]))
    return pieces, list(dict.fromkeys(lacking))


def _flag_pieces(evidence: AuditEvidence, lacking: list[_Piece]) -> int:
    runs, feedback, digests = zip(*lacking, strict=True) if lacking else ((), (), ())
    return flag_found(
        evidence.database,
        "template_drift",
        "turn",
        {"run": runs, "feedback": feedback, "digest": digests},
        f"""select p.trajectory_id, p.data_set,
            'the tokens after turn ' || (p.turn + 1) || ' do not give its feedback: "' || left(p.feedback, 80) || '"'
        from ({BETWEEN}) p join data_sets d using (data_set)
        join found f on f.run = d.run and f.feedback = p.feedback and f.digest = p.digest""",
    )


register_check("template_drift", "Drift of the prompt's form", "trajectory", template_drift)
