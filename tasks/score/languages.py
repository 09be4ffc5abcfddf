r"""Words beside a number that change or deny it, in the languages of `languages.toml`, and scripts without blanks.

| written | is |
|---|---|
| `n'est pas 42`, `nicht gleich 42`, `不是42`, `42ではない`, `42가 아니다` | no answer |
| `42个苹果`, `42です`, `42입니다` | 42 |
| `负42`, `минус 42` | -42 |
| `4万`, `4 тысячи` | 40,000 and 4,000 |
| `7或8`, `7 oder 8` | a list |
"""

import re
import tomllib
from functools import cache
from pathlib import Path

_TABLES = tomllib.loads(Path(__file__).with_name("languages.toml").read_text("utf-8")).values()


@cache
def words_of(kind: str) -> frozenset[str]:
    """Return the words of one kind in all languages."""
    return frozenset(word for table in _TABLES for word in table.get(kind, "").split())


def patterns(kind: str) -> str:
    """Return a regular expression for the words of one kind, longer ones first."""
    return "|".join(sorted(words_of(kind), key=lambda word: (-len(word), word)))


_SCRIPTS = r"\u0400-\u1dff\u2d00-\u2dff\u3005-\u3007\u3040-\ud7ff\uf900-\ufaff\ufb1d-\ufdff\ufe70-\ufefc\uff66-\uffdc"
SCRIPT = f"[{_SCRIPTS}]"
"""A letter, or a mark beside one, of a script in which no formula is written: neither Latin nor Greek."""
LETTER = rf"[A-Za-z\u00c0-\u024f\u1e00-\u1eff{_SCRIPTS}]"

_NOT, _IS = patterns("not"), patterns("is")
_NEAR = r"[\s$\\()\[\]}*\"'\u00ab\u00bb\u201c\u201d\u201e]*"
_DENIED_BEFORE = re.compile(rf"(?i)(?:(?<![\w'\u2019-])(?:{_NOT})(?:\s+(?:{_IS}))*|{patterns('denied')}){_NEAR}$")
DENIED_AFTER = re.compile(
    rf"(?i){_NEAR}(?:(?:{_IS})\s+(?:\w+\s+)?(?:{_NOT}|{patterns('wrong')})(?!\w)|(?:{_NOT})\s+(?:{_IS})(?!\w)|{patterns('after')})"
)
_BESIDE = 60
"""Most characters beside an answer in which it is denied."""
NEGATIVE = rf"(?:{patterns('minus')})(?![A-Za-z])\s*"
ALTERED = re.compile(rf"\s*(?:{patterns('altered')})")
JOINED = re.compile(rf"{patterns('or')}|{patterns('joint')}", re.IGNORECASE)
SCALES = {name: int(scale) for table in _TABLES for name, scale in table.get("scale", {}).items()}

_COUNTER = r"[\u30a0-\u9fff\uac00-\ud7a3つこ]{0,2}"
_JOINT = re.compile(rf"(?<=\d)\s?({_COUNTER})\s?(?:{patterns('joint')})\s?(?=\d)")


def is_denied(before: str, after: str = "") -> bool:
    """Return whether what stands between two texts is said to be no answer.

    >>> is_denied("La réponse n'est pas ", "."), is_denied("No, es "), is_denied("", "は答えではない")
    (True, False, True)
    """
    return bool(_DENIED_BEFORE.search(before[-_BESIDE:]) or DENIED_AFTER.match(after[:_BESIDE]))


def spaced(text: str) -> str:
    """Separate words from numbers in scripts that have no blanks.

    >>> spaced("答案是42个"), spaced("7或8")
    (' 答案是 42 个 ', '7  or 8')
    """
    if text.isascii():
        return text
    joined = _JOINT.sub(r" \1 or ", re.sub(r"百分之\s?([\d.]+)", r"\1%", text))
    return re.sub(f"{SCRIPT}+", r" \g<0> ", joined)
