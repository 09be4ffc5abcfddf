"""The scorers that ask a model beside the policy: a judge with a rubric, and a reward model.

The model is asked before the turns are scored (`tasks.annotate`), and what it said is stored. These scorers only read
that, so scores can be made again, also by another scale or parser, without asking again.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from jinja2 import StrictUndefined, Template, meta
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import Field

from configs.knobs import Temperature
from configs.models import Role
from storage.records import Annotation, VerdictName
from tasks.score.plain_text import in_ascii
from tasks.score.verdict import Answer, Verdict, storable
from tasks.score.verifier import ScorerContext
from tasks.thoughts import split, without_thoughts

PROMPT = Path(__file__).with_name("judge.jinja").read_text("utf-8")
"""The question of a judge, a template of Jinja. It may use `prompt`, `solutions`, `source`, `metadata` of the problem,
`answer` (what the agent gave to the environment), `text` (the completion), `turns` (this one and those before it, each
with `text` and `feedback`), with `score.group` also `group` (the rows of all episodes), and `low` and `high`."""
_RANGE = r"(?:[\d \t.,/-]|out|of|to|from|between|and)++"
_LINE = re.compile(
    rf"""^(?![ ]{{4}}|\t) (?:[^\w\n"'`>|~「『]*\d+[.)][ \t])? [^\w\n"'`>|~「『]*
    (?:(?:the|my|your|final|overall|total|numeric|assigned)[ \t]+)* score\b
    (?:[ \t]*[(\[]{_RANGE}[)\]] | [ \t]+(?:out|of|from|between)\b{_RANGE})?
    (?:\s*(?:[:=]|\bis\b)\s* | [ \t]*\n\s*) [(\[{{]* (?P<number>[+-]?(?:\d+(?:\.\d+|,\d\d?)?|[.,]\d+))
    (?:[ \t]*\(?(?:/|out[ ]of|of)[ \t]*(?P<most>\d+(?:\.\d+)?) | [ \t]*(?P<percent>%))?
    (?:[ \t]*points?)? [^\w\n"'`>|~%^+-]*$""",
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
"""A line that says the number and nothing else; see `JudgeScorer`."""
_TAGS = "blockquote|quote|q|cite|pre|code"
_TAG = re.compile(rf"<(/?)({_TAGS})>", re.IGNORECASE)
_QUOTED = re.compile(
    r"""^[ \t]*(?P<fence>```+|~~~+).*?(?:^[ \t]*(?P=fence)[ \t]*$|\Z)|"[^"]*"|"""
    rf"""<(?P<tag>{_TAGS})>.*?</(?P=tag)>""",
    re.DOTALL | re.IGNORECASE | re.MULTILINE,
)


_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


class JudgeScorer:
    """A judge gives each turn a number; the reward is where that lies on the scale, from 0 to 1.

    Args:
        context: what all scorers get; None only to ask.
        prompt: the question, see `PROMPT`.
        scale: the lowest and the highest number. An answer without a number between them gives the verdict `error`.
        parser: a regular expression whose last match in what the judge says after its thoughts has the number, or a
            word, as its only group. None: the last line that holds nothing but `Score: N`, in usual forms such as
            `**Score:** 8/10`, and that is in no code block, quotation or thought.
        words: numbers of words that the parser may find instead, such as {yes: 1, no: 0}; their case does not count.
        success_above: a turn is right if its number is above this one; default: the middle of the scale.
        max_new_tokens: most tokens of what the judge says.
        temperature: of what the judge says.

    Raises:
        ValueError: an argument cannot be used.
    """

    columns: Sequence[str] = ()
    version = 2  # 1: the last number after the word, wherever it stood
    role: Role = "judge"

    def __init__(
        self,
        context: ScorerContext | None,
        *,
        prompt: str = PROMPT,
        scale: tuple[float, float] = (0, 10),
        parser: str | None = None,
        words: dict[str, float] | None = None,
        success_above: float | None = None,
        max_new_tokens: Annotated[int, Field(gt=0)] = 512,
        temperature: Temperature = 0.0,
    ) -> None:
        self._annotations = context.annotations.get(self.role, {}) if context else {}
        self._low, self._high = scale
        if not -math.inf < self._low < self._high < math.inf:
            raise ValueError(f"scale={list(scale)} is no range: give the lowest number and a higher one")
        self._above = (self._low + self._high) / 2 if success_above is None else success_above
        self._words = {word.lower(): number for word, number in (words or {}).items()}
        self._prompt, self._template, self._parser = prompt, _template(prompt), parser and _parser(parser)
        self.max_new_tokens, self.temperature = max_new_tokens, temperature

    @property
    def asked(self) -> dict[str, Any]:
        """What the question depends on, besides the answer: the scale only if the prompt tells it."""
        syntax = _ENVIRONMENT.parse(self._prompt)
        tells = meta.find_undeclared_variables(syntax) & {"low", "high"}
        return {"prompt": self._prompt, **({"scale": [self._low, self._high]} if tells else {})}

    def question(self, answer: Answer) -> str:
        """Return what the judge is asked about a turn.

        Raises:
            TemplateError: the template uses what the answer lacks.
        """
        row = answer.row
        turns = [{"text": turn["text"], "feedback": turn["feedback"]} for turn in row["turns"][: answer.turn + 1]]
        return self._template.render(
            {name: row.get(name) for name in ("prompt", "solutions", "source")},
            **{"answer": answer.given, "text": answer.text, "metadata": answer.metadata, "turns": turns},
            **{"group": answer.group, "low": f"{self._low:g}", "high": f"{self._high:g}"},
        )

    def judge(self, answers: Sequence[Answer]) -> list[Verdict]:
        return [self.verdict(_said(self._annotations, self.role, answer)) for answer in answers]

    def verdict(self, stored: Annotation) -> Verdict:
        """Return the verdict on the turn about which the judge said this."""
        if stored.problem:
            return Verdict("error", reason=storable(f"the judge said nothing: {stored.problem}"))
        number, end = self._number(stored.answer), stored.answer[-300:]
        if number is None or not self._low <= number <= self._high:
            reason = f"the judge gave no number from {self._low:g} to {self._high:g}: {end!r}"
            return Verdict("error", reason=storable(reason), extracted=storable(end))
        reward = (number - self._low) / (self._high - self._low)
        name: VerdictName = "correct" if number > self._above else "wrong"
        return Verdict(name, extracted=storable(end), reward=reward, parts={"judge": number})

    def _number(self, text: str) -> float | None:
        text = without_thoughts(text)
        if not self._parser:
            return _own_number(text, self._high)
        found = self._parser.findall(text)
        if not found:
            return None
        last = found[-1].strip().lower()
        try:
            return self._words[last] if last in self._words else float(last)
        except ValueError:
            return None


def _own_number(text: str, most: float) -> float | None:
    """Return the number that a judge says in a line of its own words; None if there is none, or it has another scale.

    >>> _own_number('**Score:** 8/10', 10), _own_number('Score: 4/5', 10), _own_number('It says "Score: 9".', 10)
    (8.0, None, None)
    """
    text = in_ascii(text)
    ends = {tag[2].lower(): tag.start() for tag in _TAG.finditer(text) if tag[1]}
    # A tag that nothing ends quotes its line: many of them would be looked for up to the end of the text, each.
    text = _TAG.sub(lambda tag: tag[0] if tag.start() <= ends.get(tag[2].lower(), -1) else ">", text)
    *_, last = None, *_LINE.finditer(re.sub(r"[*_$]|\\boxed", "", _QUOTED.sub('""', text)))
    scale = last and (last["most"] or (last["percent"] and 100))
    return None if not last or (scale and float(scale) != most) else float(last["number"].replace(",", "."))


class RewardModelScorer:
    """A reward model gives each turn a number, its reward; the turn is right if it is above `success_above`."""

    columns: Sequence[str] = ()
    version = 1
    role: Role = "reward"

    def __init__(self, context: ScorerContext | None, *, success_above: float = 0.0) -> None:
        self._annotations = context.annotations.get(self.role, {}) if context else {}
        self._above = success_above

    def judge(self, answers: Sequence[Answer]) -> list[Verdict]:
        return [self._verdict(_said(self._annotations, self.role, answer)) for answer in answers]

    def _verdict(self, stored: Annotation) -> Verdict:
        if stored.problem:
            return Verdict("error", reason=storable(f"the reward model said nothing: {stored.problem}"))
        return Verdict("correct" if stored.value > self._above else "wrong", reward=stored.value)


def _said(annotations: Mapping[tuple[str, int], Annotation], role: Role, answer: Answer) -> Annotation:
    place = answer.row["trajectory_id"], answer.turn
    return annotations.get(place) or Annotation(*place, model="", problem=f"models.{role} was not asked")


def _template(prompt: str) -> Template:
    try:
        return _ENVIRONMENT.from_string(prompt)
    except TemplateError as error:
        raise ValueError(f"prompt is no template of Jinja: {error}") from None


def _parser(pattern: str) -> "re.Pattern[str]":
    try:
        parser = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"parser={pattern!r} is no regular expression: {error}") from None
    if parser.groups != 1:
        raise ValueError(f"parser={pattern!r} has {parser.groups} groups: give one, around the number or the word")
    return parser


def messages_of(answer: Answer) -> list[dict[str, Any]]:
    """Return the conversation up to a turn, which is its last message, without thoughts: what a reward model reads.

    Raises:
        ValueError: turns follow each other in a circle.
    """
    row, line = answer.row, {answer.turn: None}  # the turns up to the first one
    follows = row["follows"] or range(-1, len(row["turns"]) - 1)
    before = answer.turn
    while (before := follows[before]) >= 0:
        if before in line:
            raise ValueError(f"turn {before} follows itself, in a circle of turns")
        line[before] = None
    messages = [{"role": "user", "content": row["prompt"]}]
    for turn in (row["turns"][each] for each in reversed(line)):
        messages.append({"role": "assistant", "content": split(turn["text"])[1]})
        messages.append({"role": "user", "content": turn["feedback"]})
    return messages[:-1]
