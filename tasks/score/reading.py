r"""What is read as the final answer of a text: the contract in front of the comparison.

| text | read |
|---|---|
| thoughts (`<think>…</think>`, also without an end or a beginning), calls of tools | never |
| `… \boxed{41} … so it is \boxed{42}` | the last complete box; also `\fbox`, `boxed{42}`, `\boxed(42)` |
| `\boxed{2} and \boxed{3}` | boxes that are joined by a comma, `and`, `or` or nothing are one list |
| `<answer>42</answer>`, `#### 42`, `A: 42`, `Answer: 42`, `the answer is 42` | what follows the last of these |
| a formula on lines of its own behind such a cue | the formula, up to its end |
| other texts | their last statement: the last number, formula or words, whatever is asked for |

A statement is one number only if no other stands beside it: `7 or 8` is a list, `9 * 2` is not a number, and an earlier
number in the text never takes the place of a last one that cannot be read.
"""

import re
from dataclasses import dataclass

from tasks.score.plain_text import unescaped

_THOUGHT_TAGS = "think|thinking|thought|reasoning"
_OPENED = re.compile(rf"<(?:{_THOUGHT_TAGS})>|◁think▷|\[THINK\]|<\|begin_of_thought\|>", re.IGNORECASE)
_CLOSED = re.compile(rf"</(?:{_THOUGHT_TAGS})>|◁/think▷|\[/THINK\]|<\|end_of_thought\|>", re.IGNORECASE)
_TOKENS = re.compile(r"<\|[a-z_]+\|>|</s>|<eos>")
_CALL = re.compile(r"<(tool_call|function_call)>")


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
    text = _TOKENS.sub("", unescaped(without_thoughts(text)))
    if (box := _last_box(text)) is not None:
        return Statement(box, boxed=True)
    text = text.strip()
    if (cued := _after_cue(text)) is not None:
        return Statement(cued, boxed=False, cued=True)
    return Statement(text, boxed=False) if text else None


def without_thoughts(text: str) -> str:
    r"""Remove thoughts and calls of tools; a thought or call that never ends reaches to the end of the text.

    >>> without_thoughts("a</think>b<think>c</think>d<tool_call>e</tool_call>f<think>g")
    'b\ndf'
    """
    if closed := list(_CLOSED.finditer(text)):
        text = _outside(text, closed)
    if opened := _OPENED.search(text):
        text = text[: opened.start()]
    return _without_calls(text) if "_call>" in text else text


def _outside(text: str, closed: list[re.Match[str]]) -> str:
    """Return what is not between the marks of thoughts; all before the first end is thought, if none begins there."""
    kept, begin = list[str](), 0
    for place, end in enumerate(closed):
        opened = _OPENED.search(text, begin, end.start())
        if opened:
            kept.append(text[begin : opened.start()])
        elif place:
            kept.append("")
        begin = end.end()
    return "\n".join([*kept, text[begin:]]).lstrip("\n")


def _without_calls(text: str) -> str:
    kept, begin = list[str](), 0
    while opened := _CALL.search(text, begin):
        kept.append(text[begin : opened.start()])
        end = text.find(f"</{opened[1]}>", opened.end())
        if end < 0:
            return "".join(kept)
        begin = end + len(opened[1]) + 3
    return "".join([*kept, text[begin:]])


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
    percent = "\\%" if _PERCENT.match(text, boxes[-1][3]) else ""
    return ", ".join(dict.fromkeys(contents)) + percent


def _are_joined(between: str) -> bool:
    """Return whether nothing but a comma, `and` or `or`, and units and names, stand between two boxes."""
    if len(between) > _MOST_JOINED or "\n\n" in between or re.search(r"\.\s", between) or _TURNS.search(between):
        return False
    left = _NAME.sub("", _DELIMITERS.sub(" ", between))
    return _JOINED.search(_UNIT.sub("", left).strip(" \n")) is not None


def _boxes(text: str) -> list[tuple[int, int, int, int]]:
    """Return the places of the innermost complete boxes: beginning, beginning and end of the content, end.

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
        if len(between) <= _MOST_JOINED and re.search(r"\b(?:or|and)\s*$", between) and not _END.search(between):
            return re.sub(r"\b(?:or|and)\s*$", "", between).strip() + " or " + sentence.strip()
        return sentence.strip()
    return None


def _sentence(text: str, begin: int) -> str:
    """Return the first sentence with content from a place on."""
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
