r"""Grade an answer by the contract: `reading` finds the final answer, `golds` what the solution is; then

| the solution is | the answer must be |
|---|---|
| a plain number | the same number, evaluated (`numbers.same`), or an expression without any digit, as `\sin \pi` |
| several plain numbers | as many, in any order; in the same order if the solution has brackets or several names |
| words | the same words; a choice may have its text behind it, as `(C) 42`, but no other choice and no `not` |
| a time, a number in a base, a sequence | the same, as it is written |
| an interval or a set | equal, and solved: no other inequality |
| anything else | equal for math-verify, where equal means more than that both have no solutions or are both small |

A placeholder (`proof`, `notfound`, `N/A`) is no solution, nor is what math-verify cannot read. An answer to a problem
without a usable solution is `wrong`: the problem is to blame, not the scorer.
"""

import re

from storage.records import VerdictName
from storage.visible import described
from tasks.score import golds
from tasks.score.golds import Gold, Listed, interval
from tasks.score.library import equal, parsed
from tasks.score.numbers import LONGEST, ROUGHLY, readings, same
from tasks.score.plain_text import in_ascii, unstyled
from tasks.score.reading import Statement, final_statement, last_choice, last_formula, last_numbers, last_words
from tasks.score.verdict import Verdict, storable


def grade(answer: str, solutions: tuple[str, ...]) -> Verdict:
    """Return the verdict on one answer, which is correct if it matches any of the solutions (1 or more)."""
    try:
        return _graded(answer, solutions)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a mistake of the contract costs one answer, and its verdict says so
        return Verdict("error", "", solutions[0], storable(f"answer {answer!r:.100}: {described(error)}"))


def _graded(answer: str, solutions: tuple[str, ...]) -> Verdict:
    usable = [gold for solution in solutions if (gold := golds.read_gold(solution)) is not None]
    if not usable:
        return Verdict("wrong", "", solutions[0], storable(f"no solution, only placeholders: {solutions!r}"))
    statement = final_statement(answer)
    if statement is None:
        return Verdict("unparsable", "", usable[0].solution, storable(f"no final answer in {answer!r}"))
    reasons, shown = list[str](), ""
    for gold in usable:
        right, read, reason = _compare(statement, gold)
        if right:
            return Verdict("correct", storable(read), gold.solution)
        shown = shown or read
        reasons.append(reason)
    name: VerdictName = "wrong" if shown or statement.boxed else "unparsable"
    return Verdict(name, storable(shown), usable[0].solution, storable("; ".join(filter(None, reasons))))


Compared = tuple[bool, str, str]
"""Whether the answer is right, what was read as the answer, and a reason if something could not be read."""


def _compare(statement: Statement, gold: Gold) -> Compared:
    if gold.words is not None:
        return _with_words(statement, gold.words)
    if gold.written is not None and (compared := _with_written(statement, gold.written)) is not None:
        return compared
    if gold.number is not None or gold.listed is not None:
        return _with_numbers(statement, gold)
    return _with_expression(statement, gold)


def _with_numbers(statement: Statement, gold: Gold) -> Compared:
    """Compare numbers. An answer that is none is an expression without any digit, or wrong."""
    texts = [statement.text] if statement.boxed else last_numbers(statement)
    read = ", ".join(texts)
    number = gold.number
    if number and texts and all(any(same(number, each) for each in readings(text)) for text in texts):
        return not _renamed(gold.text, read), read, ""
    formula = statement.text if statement.boxed else last_formula(statement) or ""
    if listed := golds.read_list(_plain_list(read)) or golds.read_list(_plain_list(formula)):
        if gold.listed:
            return _same_lists(gold.listed, listed), read, ""
        repeated = not listed.brackets and len(listed.distinct_names) < 2  # a number in two notations: `1/2 or 0.5`
        return repeated and number is not None and all(same(number, each) for each in listed.numbers), read, ""
    is_short = 0 < len(formula) <= LONGEST
    if not is_short or re.search(r"\d", in_ascii(formula)) or (gold.number and golds.read_words(formula)):
        return False, read, "" if read else storable(f"no number in {statement.text!r}")
    return _with_expression(statement, gold)


_ASIDE = re.compile(r"(?<=[\d}%])\s+\(([^(),]*)\)\s*$")


def _plain_list(text: str) -> str:
    """Write inequalities as an interval, and `1/2 (0.5)` as a list."""
    found = interval(text)
    return found[1] if found else _ASIDE.sub(r", \1", text)


def _renamed(gold: str, answer: str) -> bool:
    """Return whether a solution and an answer say what two different variables are: `x = 5` and `y = 5`."""
    names = [_name(gold), _name(answer)]
    if not all("(" in name for name in names):  # P is P(A)
        names = [name.partition("(")[0] for name in names]
    return all(names) and names[0] != names[1]


def _name(text: str) -> str:
    """Return what stands before the first `=`, if it has a letter and is no word; else nothing."""
    side, equals, _ = unstyled(in_ascii(text)).partition("=")
    name = re.sub(r"\\angle|\\[()\[\]]|[\s{}$*]", "", side)
    return name if equals and re.search("[A-Za-z]", name) and not re.search(r"(?<![\\A-Za-z])[A-Za-z]{3}", name) else ""


def _same_lists(gold: Listed, answer: Listed) -> bool:
    other_brackets = gold.is_ordered and answer.is_ordered and gold.brackets != answer.brackets
    if len(gold.numbers) != len(answer.numbers) or other_brackets:
        return False
    names, others = gold.distinct_names, answer.distinct_names
    if len(names) > 1 and others:
        pairs = [dict(zip(each.names, each.numbers, strict=True)) for each in (gold, answer)]
        return names == others and all(same(number, pairs[1][name]) for name, number in pairs[0].items())
    if names and others and names != others:
        return False
    if gold.is_ordered or len(names) > 1:
        return all(map(same, gold.numbers, answer.numbers))
    left = list(answer.numbers)
    for number in gold.numbers:
        if not (found := [other for other in left if same(number, other)]):
            return False
        left.remove(found[0])
    return True


def _with_words(statement: Statement, words: str) -> Compared:
    """Compare words. If they are one letter, the answer may be that choice with its text."""
    if len(words) == 1:
        choice = last_choice(statement)
        return choice == words, choice or "", ""
    candidates = [statement.text] if statement.boxed else last_words(statement)
    right = any(golds.canonical_words(golds.plain_words(candidate)) == words for candidate in candidates)
    return right, candidates[-1][:LONGEST] if candidates else "", ""


def _with_written(statement: Statement, gold: str) -> Compared | None:
    """Compare what is compared as it is written; None for a ratio that is written in another way."""
    text = statement.text if statement.boxed else last_formula(statement) or ""
    read = golds.written(text)
    if read is None and not statement.boxed and "..." not in gold:
        read = golds.last_written(statement.text)
    if read != gold and re.fullmatch(r"\d+:\d", gold):
        return None
    return read == gold or _squeezed(text) == gold.partition("_")[0], read or text, ""


def _with_expression(statement: Statement, gold: Gold) -> Compared:
    text = statement.text if statement.boxed else last_formula(statement)
    if not text:
        return False, "", storable(f"no formula in {statement.text!r}")
    if "approx" not in gold.text:
        text = ROUGHLY.split(text)[0].strip() or text
    if _squeezed(text) == _squeezed(gold.text):
        return True, text, ""
    if _UNEVALUATED.search(text) and not _UNEVALUATED.search(gold.text):
        return False, text, ""
    if not parsed(gold.text):
        return False, text, storable(f"math-verify cannot read the solution {gold.solution!r}")
    if not statement.boxed and all(isinstance(each, str) for each in parsed(text)):
        return False, "", storable(f"math-verify cannot read {text!r}")
    return _equal(gold, text), text, ""


_UNEVALUATED = re.compile(r"\\(?:int|sum|prod|lim)(?![a-z])|\\[dt]?frac\s?\{\s?d\s?\}")


def _equal(gold: Gold, text: str) -> bool:
    brackets, others = golds.split_list(gold.text)[0], golds.split_list(text)[0]
    if brackets != others and {brackets, others} <= {"()", "[]", "(]", "[)"}:
        return False
    ours = interval(text)
    if gold.interval and ours:
        return gold.interval[0] == ours[0] and equal(gold.interval[1], ours[1])
    if not ours and (gold.interval or _SET.match(gold.text)) and _is_unsolved(text):
        return False
    if gold.interval or (ours and not _RELATION.search(gold.text)):
        return equal(gold.interval[1] if gold.interval else gold.text, ours[1] if ours else text)
    return equal(gold.text, _renaming(gold.text, text))


_INEQUALITY = re.compile(r"[<>]|\\(?:leq?|geq?|lt|gt|neq?)(?:slant)?(?![A-Za-z])")
_RELATION = re.compile(rf"=|{_INEQUALITY.pattern}")


def _is_unsolved(text: str) -> bool:
    """Return whether a text is an inequality of anything but a variable or its negative."""
    plain = in_ascii(text)
    return _INEQUALITY.search(plain) is not None and not interval(re.sub(r"-\s?(?=[A-Za-z])", "", plain))


_SET = re.compile(r"\s*(?:[A-Za-z]\s*\\in\s*)?(?:\\left)?\s*(?:[(\[]|\\\{)")
_FUNCTION = re.compile(r"\s*([A-Za-z])\s*\(\s*([A-Za-z])\s*\)\s*=")


def _renaming(gold: str, answer: str) -> str:
    """Name the argument of a function as in the solution: f(t) = t^2 is f(x) = x^2."""
    ours, theirs = _FUNCTION.match(gold), _FUNCTION.match(answer)
    if not ours or not theirs or ours[1] != theirs[1] or ours[2] == theirs[2]:
        return answer
    return re.sub(rf"(\\[A-Za-z]+)|{theirs[2]}", lambda found: found[1] or ours[2], answer)


def _squeezed(text: str) -> str:
    r"""Return LaTeX without what changes only its looks.

    >>> _squeezed(r"\left(1, \dfrac{1}{2}\right).")
    '(1,\\frac12)'
    """
    return _LOOKS.sub("", re.sub(r"\\[dt]frac", r"\\frac", text)).replace("\\neq", "\\ne").rstrip(".")


_LOOKS = re.compile(r"[\s{}$]|\\(?:left|right|displaystyle)(?![A-Za-z])|\\[,;!: ]")
