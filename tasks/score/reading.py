r"""What is read as the final answer of a text: the contract in front of the comparison.

| text | read |
|---|---|
| thoughts (`tasks.thoughts`, also without an end or a beginning), calls of tools | never |
| `… \boxed{41} … so it is \boxed{42}` | the last complete box; also `\fbox`, `boxed{42}`, `\boxed(42)` |
| `\boxed{2} and \boxed{3}` | boxes that are joined by a comma, `and`, `or` or nothing are one list |
| `<answer>42</answer>`, `#### 42`, `A: 42`, `Answer: 42`, `the answer is 42` | what follows the last of these |
| a formula on lines of its own behind such a cue | the formula, up to its end |
| other texts | their last statement: the last number, formula or words, whatever is asked for |

A statement is one number only if no other stands beside it: `7 or 8` is a list, `9 * 2` is not a number, and an earlier
number in the text never stands in for a last one that cannot be read. What is denied is no answer, not even in a box;
`41, not 42` is 41.
`last_numbers`, `last_formula`, `last_words` and `last_choice` find these in a statement with other words around them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tasks.score.numbers import ALTERED, JOINED, NEGATIVE, SCALE, SCRIPT, UNITS, is_denied, patterns, spaced, words_of
from tasks.score.plain_text import in_ascii, unescaped, unmarked, unstyled
from tasks.thoughts import without_thoughts

_TOKENS = re.compile(r"<\|[a-z_]+\|>|</s>|<eos>")
_CALL = re.compile(r"<(tool_call|function_call)>.*?(?:</\1>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Statement:
    r"""The final answer of a text, as it is written.

    Example: `so \boxed{2} or \boxed{3}` is Statement("2, 3", boxed=True), `The answer is 42, I think.` is
    Statement("42, I think.", boxed=False)
    """

    text: str
    boxed: bool  # a box holds nothing but the answer; another statement may have words around it
    cued: bool = False  # it follows `answer is`, `####` or the like


def final_statement(text: str) -> Statement | None:
    r"""Return the final answer of a text, or None if it has none.

    >>> final_statement(r"<think>\boxed{1}</think> first \boxed{2}, so it is \boxed{3}.").text
    '3'
    >>> final_statement("The answer is 42.").text, final_statement("<think>42</think>")
    ('42', None)
    """
    text = _TOKENS.sub("", unescaped(_CALL.sub("", without_thoughts(text))))
    if (box := _last_box(text)) is not None:
        return Statement(box, boxed=True)
    text = text.strip()
    if (cued := _after_cue(text)) is not None:
        return Statement(cued, boxed=False, cued=True)
    return Statement(text, boxed=False) if text else None


_BRACES = re.compile(r"(\\?\b(?:boxed|fbox|framebox)\s{0,9}([{(]))|\\boxed\s{1,9}([^\s{}\\$]+)|\\.|[{}()]", re.DOTALL)
_JOINED = re.compile(r"(?:^|[,;&]|\band|\bor)[\s}]*$")
_UNIT = re.compile(r"^\s*(?:\\text\s?\{)?\s*[A-Za-z%]+\s*\}?\s*(?=[,;]|$)")
_NAME = re.compile(r"(?:[A-Za-z](?:_\{?\w\}?)?\s*=\s*)?[\s$]*$")
_DELIMITERS = re.compile(r"\\[()\[\],; ]|\\q?quad(?![A-Za-z])|\$")
_TURNS = re.compile(r"\b(?:so|thus|hence|therefore|but|no|not|wait|then|final|finally|is|instead|actually)\b", re.I)
_PERCENT = re.compile(r"\}*\s?\\?%")
_MOST_JOINED = 40
"""Most characters between two boxes of one list."""


def _last_box(text: str) -> str | None:
    """Return the content of the last complete box, or of all that are joined with it; empty ones count."""
    if "box" not in text or not (boxes := _boxes(text)):
        return None
    last = len(boxes) - 1
    while last and _are_joined(text[boxes[last - 1][3] : boxes[last][0]]):
        last -= 1
    contents = [text[begin:end].strip() for _, begin, end, _ in boxes[last:]]
    if is_denied(text[: boxes[last][0]]):
        contents.insert(0, "not")
    percent = "\\%" if _PERCENT.match(text, boxes[-1][3]) else ""
    return ", ".join(dict.fromkeys(contents)) + percent


def _are_joined(between: str) -> bool:
    """Return whether nothing but a comma, `and` or `or`, and units and names, stand between two boxes."""
    if len(between) > _MOST_JOINED or "\n\n" in between or re.search(r"\.\s", between) or _TURNS.search(between):
        return False
    left = _NAME.sub("", _DELIMITERS.sub(" ", between))
    return _JOINED.search(_UNIT.sub("", left).strip(" \n")) is not None


def _boxes(text: str) -> list[tuple[int, int, int, int]]:
    """Return the positions of the innermost complete boxes: beginning, beginning and end of the content, end.

    It reads the text in one pass, because a policy that loops may open thousands of boxes.
    """
    open_braces: list[tuple[str, int, int]] = []  # kind, begin of the box or -1, begin of its content
    found: list[tuple[int, int, int, int]] = []
    for mark in _BRACES.finditer(text):
        if mark[1]:
            open_braces.append((mark[2], mark.start(), mark.end()))
        elif mark[3]:
            found.append((mark.start(), mark.start(3), mark.end(3), mark.end()))
        elif mark[0] in "{(":
            open_braces.append((mark[0], -1, -1))
        elif (outer := _closed(open_braces, mark[0])) and outer[1] >= 0 and not (found and found[-1][0] > outer[1]):
            found.append((outer[1], outer[2], mark.start(), mark.end()))
    return found


def _closed(open_braces: list[tuple[str, int, int]], mark: str) -> tuple[str, int, int] | None:
    """Remove and return the brace that a mark closes; one of `}` may have parentheses in it, as in `[0, 2)`."""
    if mark == ")":
        return open_braces.pop() if open_braces and open_braces[-1][0] == "(" else None
    while mark == "}" and open_braces:
        if (last := open_braces.pop())[0] == "{":
            return last
    return None


_CUE = re.compile(
    r"<(?:final_)?answer>|####|(?:答案是|答案为|答えは)[*_`:\s]{0,9}|\banswers?\b[*_`:\s]{0,9}(?:\b(?:is|are|was|equals|would\sbe|will\sbe)\b|[:=])[*_`:\s]{0,9}|^A\s?:"
    r"|^[#*_ ]{0,9}(?:the\s)?(?:final\s)?answer[*_:. ]{0,9}$",
    re.IGNORECASE | re.MULTILINE,
)
_CHOICES = re.compile(r"^B\s?:", re.MULTILINE)
_END = re.compile(r"(?<!\\)[.!?;](?=\s|$)|。|\n|</(?:final_)?answer>")


def _after_cue(text: str) -> str | None:
    """Return the first sentence after the last cue; all that are cued in one sentence, if they are several."""
    choices = _CHOICES.search(text) is not None
    cues = [cue for cue in _CUE.finditer(text) if not (choices and re.fullmatch(r"A\s?:", cue[0], re.I))]
    while cues:
        cue = cues.pop()
        sentence = _sentence(text, cue.end())
        if not sentence.strip(" *_`:$"):
            continue
        between = text[cues[-1].end() : cue.start()] if cues else "\n"
        joint = re.search(r"\b(?:or|and)\s*$", between)
        if joint and len(between) <= _MOST_JOINED and not _END.search(between):
            return f"{between[: joint.start()].strip()} or {sentence.strip()}"
        return sentence.strip()
    return None


def _sentence(text: str, begin: int) -> str:
    """Return the first sentence with content from a position on."""
    while begin < len(text) and text[begin] in " \t\n*:_":
        begin += 1
    display = _DISPLAY.match(text, begin)
    end = _END.search(text, display.end() if display else begin)
    while end and end[0] == "." and _ABBREVIATED.search(text, max(begin, end.start() - 4), end.end()):
        end = _END.search(text, end.end())
    sentence = text[begin : end.start() if end else len(text)]
    return sentence.replace("\n", " ") if display else sentence


_DISPLAY = re.compile(r"\$\$[^$]*\$\$|\\\[.*?\\\]|\\begin\s?\{(\w+\*?)\}.*?\\end\s?\{\1\}", re.DOTALL)
"""A formula on lines of its own, whose ends of lines end no sentence."""
_ABBREVIATED = re.compile(r"\b(?:Rs|No|St|Mr|Dr|vs|Mrs)\.$")


_LONGEST_LINE = 5_000
"""Most characters at the end of a line in which its last number is searched."""
_ANNOTATION = re.compile(r"<<[^<>]{0,200}>>")  # of GSM8K's calculator: `9 * 2 = <<9*2=18>>18`
_BULLET = re.compile(r"^\s*(?:[-*•+]\s+(?=[^\s\d]|\d[\d.,]*\s+[A-Za-z])|\(?\d{1,2}[.)]\s+(?=\S))")
_MIXED = re.compile(r"(\d) and (?=\d+/\d)")
_COMPUTED = re.compile(r"(?<=\d)\s\([^()]{0,60}(?:[*+]|\\(?:times|cdot)|\b(?:times|plus)\b)[^()]{0,60}\)")  # 42 (6 * 7)
_SENTENCES = re.compile(r"(?<=(?<!\\)[.!?])\s+")
_WORD = re.compile(
    rf"(?<![\\\w^])(?:{SCRIPT}+(?=\s)|"
    r"[^\W\d_]{2,}(?:['\u2019-][^\W\d_]+)*(?![\w(^])|I['\u2019][a-z]+|[aAI](?=\s)|[^\x00-\x7f](?=\s))(?!\s*[=*/^])"
)
_NO_ANSWER = re.compile(rf"(?:\b(?:{patterns('part')})|{patterns('before')})$")
"""Words before a number that is not the answer."""
_CONTRAST = re.compile(r"\d[^\d.]{0,20}(?:,|이고|이지|이며|であ[っり])[^\d.]{0,20}$")
"""What stands before the second number of `41, not 42`."""
_NEGATED = re.compile(NEGATIVE + "$", re.IGNORECASE)
_CHANGING = words_of("operation") | words_of("percent")
_LABEL = re.compile(r"\s*[#(]?\d+[.:)]*")
_BEFORE_SIGN = frozenset(("", "is", "are", "answer", "equals", "be", "get", "gives"))


@dataclass(frozen=True, slots=True)
class _Segment:
    """What stands between two words and has a digit: a number or a formula."""

    text: str
    before: str  # the four words before, in lower case
    after: str  # the word after
    position: int  # how many words are before it
    left: str  # all that stands before it in the sentence
    is_denied: bool


def last_numbers(statement: Statement) -> list[str]:
    r"""Return the last number in a statement with words, as it is written; several if they are a list.

    >>> last_numbers(Statement("She has 3 1/2 cups.", False)), last_numbers(Statement("7 + 35\n= 42", False))
    (['3 1/2'], ['= 42'])
    >>> last_numbers(Statement("It is 7 or 8.", False)), last_numbers(Statement("It is 16 - 7, or 9 * 2", False))
    (['7', '8.'], ['16 - 7', '9 * 2'])
    """
    for line in reversed(statement.text.splitlines()):
        if found := _last_of_line(line, cued=statement.cued):
            return found
    return []


def _last_of_line(line: str, *, cued: bool) -> list[str]:
    if not any(character.isnumeric() for character in line[-_LONGEST_LINE:]):
        return []
    plain = spaced(unmarked(unstyled(in_ascii(_ANNOTATION.sub("", line[-_LONGEST_LINE:]))))).replace("\\$", "$")
    plain = _MIXED.sub(r"\1 ", plain).replace(" and a half", " 1/2").replace("% of ", " percent of ")
    plain = _COMPUTED.sub("", plain)
    for sentence in reversed(_SENTENCES.split(plain if cued else _BULLET.sub("", plain, count=1))):
        if groups := _groups(sentence):
            one, other = groups[0][0], groups[-1][0]
            if one is not other and other.is_denied and _CONTRAST.search(other.left):
                groups.pop()
            first = cued and not one.is_denied and _FILLERS.fullmatch(one.left)
            return [_written(segment) for segment in groups[0 if first else -1]]
    return []


_FILLERS = re.compile(r"(?i)(?:is|are|about|approximately|exactly|just|only|simply|therefore|thus|that|[\s\W])*")


def _groups(sentence: str) -> list[list[_Segment]]:
    """Return the numbers and formulas of a sentence; those that `and` or `or` joins are one list."""
    groups: list[list[_Segment]] = []
    words = [match[0].casefold() for match in _WORD.finditer(sentence)]
    for segment in _segments(sentence):
        between = words[groups[-1][-1].position : segment.position] if groups else []
        # At most two words stand between two numbers of a list: `27 cats and 64 dogs`.
        if between == ["to"] or (0 < len(between) <= 2 and JOINED.fullmatch(between[-1])):
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return groups


def _segments(sentence: str) -> Iterator[_Segment]:
    """Yield what stands between words and has a digit, unless it is the number of a step, a question or the like."""
    begin, words = 0, list(_WORD.finditer(sentence))
    for position, word in enumerate([*words, None]):
        text = sentence[begin : word.start() if word else len(sentence)]
        if position and words[position - 1][0].casefold() in words_of("label"):
            text = _LABEL.sub("", text, count=1)
        if any(character.isdigit() for character in text):
            before = " ".join(each[0] for each in words[max(position - 4, 0) : position]).casefold()
            number = _stripped(text, last=word is None)
            left, _, right = text.partition(number)
            left, right = sentence[:begin] + left, right + sentence[word.start() :] if word else right
            yield _Segment(number, before, word[0] if word else "", position, left, is_denied(left, right))
        if word:
            begin = word.end()


def _stripped(text: str, *, last: bool) -> str:
    """Return a number without marks around it, such as brackets that do not end and a dash before the next word."""
    text = text.strip() if last else re.sub(r"(?<=\S)\s?-$", "", text.strip())
    closed = re.search(r"[)\]][.,;!]*$|^\|[^|\s]+\|\W*$", text)
    return text.strip(" \t!,;" if closed else " \t!,;|([")


def _written(segment: _Segment) -> str:
    """Return a number with the word before or after it that belongs to it; a part of a computation cannot be read."""
    text, before, after = segment.text, segment.before.rpartition(" ")[2], segment.after
    binary = text[:1] in "*/^" or (text[:1] in "+-" and text[1:2].isspace())
    if segment.is_denied or _NO_ANSWER.search(segment.before) or (binary and before not in _BEFORE_SIGN):
        return f"not {text.lstrip(': ')}"
    if _NEGATED.search(segment.left):
        text = f"minus {text}"
    changed = SCALE.match(after) or ALTERED.match(after) or after in UNITS or after.casefold() in _CHANGING
    return f"{text} {after}" if changed else text


_DOLLARS = r"(?<!\\)\$\$?([^$]+)(?<!\\)\$\$?"
BETWEEN_DOLLARS = re.compile(_DOLLARS)
_FORMULA = re.compile(rf"{_DOLLARS}|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_BETWEEN = re.compile(r"[\s,;.]*(?:and|or|,|;)?[\s,;]*")
_PROSE = re.compile(r"(?<![\\A-Za-z])[^\W\d_]{4,}")
_LONGEST_FORMULA = 500
_ALIGNED = re.compile(r"\\begin\s?\{(?:align|gather|equation)\w*\*?\}(.*?)\\end\s?\{\w+\*?\}", re.DOTALL)


def last_formula(statement: Statement) -> str | None:
    r"""Return the last formula between delimiters, or those that a comma, `and` or `or` joins with it.

    Without delimiters it is what follows the last `is`, `are` or colon of the last line, if that has no long words.

    >>> last_formula(Statement("So it is $x^2$ or $y$.", False)), last_formula(Statement("It is x+1.", False))
    ('x^2, y', 'x+1')
    """
    paragraph = statement.text.rfind("\n\n", -_LONGEST_LINE, -_LONGEST_FORMULA) + 1  # cuts no formula
    tail = _ALIGNED.sub(_last_row, statement.text[paragraph or -_LONGEST_LINE :])
    found = list(_FORMULA.finditer(tail))
    if found and statement.cued and re.search(r"\d", tail[: found[0].start()]):
        return None  # a number stands first
    if found:
        joined = _joined(tail, found, first=statement.cued and not tail[: found[0].start()].strip(" *_:"))
        return joined if len(joined) <= _LONGEST_FORMULA else None
    lines = [line for line in tail[-_LONGEST_FORMULA:].splitlines() if line.strip()]
    bare = re.split(r"\b(?:is|are)\b|:\s", unmarked(lines[-1]))[-1].strip(" \t.,;$") if lines else ""
    return bare if bare and not _PROSE.search(unstyled(bare)) else None


def _last_row(aligned: re.Match[str]) -> str:
    return "\\[" + aligned[1].rpartition("\\\\")[2].replace("&", "").strip(" =\n") + "\\]"


def _joined(text: str, found: list[re.Match[str]], *, first: bool) -> str:
    """Join formulas from the last one backwards, or from the first one on, while nothing else stands between them."""
    groups = [[found[0]]]
    for formula in found[1:]:
        if _BETWEEN.fullmatch(text, groups[-1][-1].end(), formula.start()):
            groups[-1].append(formula)
        else:
            groups.append([formula])
    chosen = groups[0] if first else groups[-1]
    between = text[chosen[0].end() : chosen[-1].start()]
    if is_denied(text[: chosen[0].start()]):
        return ""
    joint = " or " if re.search(r"\bor\b", between) and re.search(r"[<>]|\\[lg]e", chosen[0][0]) else ", "
    return joint.join(next(filter(None, formula.groups()), "").strip(" .,") for formula in chosen)


# What begins with blanks is tried at the first of them only, and takes all: else many blanks take quadratic time.
_CLAUSE = re.compile(r"(?<!\s)\s*+(?:[,;:(\u2013\u2014]|(?<=\s)-\s|\b(?:because|since|as|so)\b)")
_ITEMS = re.compile(r",\s*(?:(?:or|and)\s+)?[\w-]+\s*(?:,|$|\b(?:or|and)\b)|\b(?:or|and)\s+[\w-]+$")
_REASON = re.compile(r"(?:,|(?<!\s))\s++(?:because|since|as|who|which|where)\b", re.IGNORECASE)
_IS = re.compile(r"\b(?:is|are|was|be|get|gives|(?:it|that|answer)['\u2019]s)\b", re.IGNORECASE)
_IS_OR_COLON = re.compile(rf"{_IS.pattern}|[=:]", re.IGNORECASE)
_LEADING = re.compile(
    r"\A(?:(?:it|that|this|option|choice|letter|on|in|the|(?-i:an?)|is|i|think|choose|pick|(?:so|hence|therefore|thus),?)\s+)+",
    re.IGNORECASE,
)
_DECIDED = re.compile(r"(?:so\s+)?(yes|no|true|false)\s*(?:[.,;:!]|$|\s(?:-|because|since|as)\s)", re.IGNORECASE)
_OPPOSITES = {"yes": "no", "no": "yes", "true": "false", "false": "true"}


def last_words(statement: Statement) -> list[str]:
    """Return the words that a statement may end with: its last sentence, what follows its last `is`, a first clause.

    They are one within the other; a statement whose parts name different words has none.

    >>> last_words(Statement("So the day is Tuesday, I think.", False)), last_words(Statement("Yes, is No", False))
    (['So the day is Tuesday, I think', 'Tuesday, I think', 'Tuesday'], [])
    """
    sentences = _last_sentences(statement)
    if not sentences:
        return []
    last = (sentences[0] if statement.cued else sentences[-1]).strip(" .!?")
    if decided := _DECIDED.match(unmarked(sentences[0]).strip()):
        contrary = rf"\b{_OPPOSITES[decided[1].casefold()]}\b(?!\s+[a-z])"
        return [] if re.search(contrary, " ".join(sentences), re.IGNORECASE) else [last, decided[1]]
    short = _REASON.split(last, maxsplit=1)[0]
    clause = short if _ITEMS.search(short) else _CLAUSE.split(short, maxsplit=1)[0]
    found = [word for text in (short, clause) if (word := _LEADING.sub("", _IS_OR_COLON.split(text)[-1].strip()))]
    if found and not found[0].startswith(found[-1]) and not found[0].endswith(found[-1]):
        return []
    formulas = [] if _IS_OR_COLON.search(last) or clause != last else _formulas(last)
    return list(dict.fromkeys([last, *found, *formulas[-1:]]))


def _formulas(text: str) -> list[str]:
    return ["".join(parts) for parts in _FORMULA.findall(text)]


def _last_sentences(statement: Statement) -> list[str]:
    """Return the sentences of the last line; one that begins with a choice, as `C. 42`, is a single sentence."""
    lines = [line for line in statement.text[-_LONGEST_FORMULA:].splitlines() if line.strip()]
    if not lines or _MARKED.match(lines[-1]):
        return lines[-1:]
    return [each for each in _SENTENCES.split(lines[-1]) if each.strip()]


_MARKED = re.compile(r"\W{0,9}[A-Z][).:]")
_CHOICE = re.compile(
    r"[(\[]*([A-Z])(?:\s*[)\].:,;]|$|\s+-\s|\s+(?:because|since|as|is\s+(?:the\s+)?(?:correct|right|true|best|answer))\b)"
)
_ONLY = re.compile(r"([^A-Za-z\d]*)([A-Z])([^A-Za-z\d]*)")
"""A choice between words in another script."""
_DOUBT = re.compile(
    r"\b([A-Z])(?:[).:]|$)|(?:\bor\b|\band\b|,)\s*\(?([A-Z])\b|\b((?:not|wrong|incorrect|false)\b|(?<=n)'t\b)"
)


def last_choice(statement: Statement) -> str | None:
    r"""Return the letter of the one choice that a statement names, in lower case; no other and no `not` is behind it.

    >>> [last_choice(Statement(text, False)) for text in ("So it must be (C).", "**C. 42**", "C is correct.", "A or B")]
    ['c', 'c', 'c', None]
    """
    sentences = [statement.text] if statement.boxed else _last_sentences(statement)
    if not sentences:
        return None
    sentence = sentences[0] if statement.cued else sentences[-1]
    last = unmarked(unstyled(in_ascii(sentence.replace("$", "")))).strip(" .!?")
    if (only := _ONLY.fullmatch(last)) and not is_denied(*only.group(1, 3)):
        return only[2].casefold()
    predicate = _IS.split(last)[-1]
    parts = [last, predicate, predicate.rpartition(":")[2], _CLAUSE.split(last, maxsplit=1)[0]]
    named = set[str]().union(*map(_named, parts))
    if not named and not statement.boxed and (formulas := _formulas(sentence)):
        return last_choice(Statement(formulas[-1], boxed=True))
    return named.pop() if len(named) == 1 else None


def _named(text: str) -> set[str]:
    """Return the letter of the choice with which a text begins, and what stands behind that puts it in doubt."""
    text = _LEADING.sub("", text.strip())
    if len(letter := text.strip("()[] .")) == 1 and letter.isalpha():
        return {letter.casefold()}
    if not (choice := _CHOICE.match(text)):
        return set()
    behind = _REASON.split(text[choice.end(1) :], maxsplit=1)[0]
    return {choice[1].casefold()} | {"".join(doubt).casefold() for doubt in _DOUBT.findall(behind)}
