r"""Write answers in one way, before anything is read in them: characters of any script, LaTeX's layout, emphasis.

| written | becomes |
|---|---|
| `１８`, `١٨`, `−18`, `½`, `m²`, `×` | `18`, `18`, `-18`, ` 1/2`, `m^2`, `\times ` |
| `\left(`, `\displaystyle`, `\large`, `\,`, `~` | `(`, nothing, nothing, a blank, a blank |
| `\text{cm}`, `\boldsymbol{42}`, `\textcolor{red}{42}` | `cm`, `42`, `42` |
| `\\frac{1}{2}`, `18\\%` outside of matrices, as JSON escaped twice | `\frac{1}{2}`, `18\%` |
| `42。`, `1、2`, `٪` | `42. `, `1, 2`, `%` |
| `**42**`, `` `42` ``, `<b>42</b>`, `“42”` | `42` |
"""

import re
import unicodedata

_CHARACTERS = {
    **dict.fromkeys("−–—‐‑‒﹣", "-"),
    **dict.fromkeys("\u00a0\u2002\u2003\u2007\u2009\u200a\u202f\u205f\u3000", " "),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad\ufe0f", ""),
    **dict.fromkeys("“”„«»〝〞「」『』【】《》", '"'),
    **dict.fromkeys("‘’‚", "'"),
    **{"。": ". ", "।": ". ", "۔": ". ", "、": ", ", "،": ", ", "؟": "? ", "٫": ".", "٬": ",", "٪": "%"},
    **{mark: chr(ord(mark) - 0xFEE0) for mark in "（）［］｛｝，．：；＋－＝％＄＜＞！／＊＾"},
    **dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", [f"^{power}" for power in "0123456789-"], strict=True)),
    **dict(zip("₀₁₂₃₄₅₆₇₈₉", [f"_{index}" for index in "0123456789"], strict=True)),
    **{"⁄": "/", "∕": "/", "×": "\\times ", "⋅": "\\cdot ", "·": "\\cdot ", "÷": "\\div ", "∗": "*"},
    **{"≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "≈": "\\approx ", "±": "\\pm ", "∞": "\\infty ", "∅": "\\emptyset "},
    **{"∈": "\\in ", "∪": "\\cup ", "∩": "\\cap ", "π": "\\pi ", "√": "\\sqrt ", "…": "\\ldots ", "°": "^\\circ "},
}
_POWERS = re.compile(r"(\^-?\d)\^(?=\d)")
_DASH = re.compile(r"(?<=[\w*)$}.%])\s{0,9}—\s{0,9}")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_DOUBLED = re.compile(r"\\\\(?=[A-Za-z()\[\]$%{}])")
_LAYOUT = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|limits|tiny|small|large|Large|LARGE|huge|Huge|[bB]igg?[lrm]?|bf|it|rm|sf|tt|em)(?![A-Za-z])\.?"
    r"|\\!\s?|\\(?:begin|end)\s?\{(?:aligned|align\*?|gathered|equation\*?|split)\}"
)
_BLANKS = re.compile(r"\\[,;:> ]|\\(?:enspace|thinspace)(?![A-Za-z])|(?<!\\)~")
_WIDE = re.compile(r"\\q?quad(?![A-Za-z])")
_THOUSANDS = re.compile(r"\s?\{\s?,\s?\}\s?")
_COLOURED = re.compile(r"\\(?:textcolor|color)\s?\{[^{}]*\}")
_STYLED = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal|up)?|math(?:bf|rm|it|sf|tt|normal)|mbox|hbox|boldsymbol|bm|bold|emph"
    r"|underline|operatorname)\s?\{([^{}]*)\}"
)
_DEEPEST = 8  # styles within styles
_TAG = re.compile(r"</?(?:b|i|u|em|strong|code|span|p|br|(?:final_)?answer)\s?/?>", re.IGNORECASE)
_EMPHASIS = re.compile(r"\*\*|(?<![A-Za-z0-9])__(?=\S)|(?<=\S)__(?![A-Za-z0-9{])|`")
_THIN = re.compile(
    r"(?<![\w*}) ])\*(?=[\w$-])|(?<=[\w.%)])\*(?![\w*({\\ -])|(?<![A-Za-z0-9}])_(?=[\w$-])|(?<=\d)_(?!\w|\{)"
)


def in_ascii(text: str) -> str:
    r"""Write digits, signs and marks of any script in one way; other characters stay.

    >>> in_ascii("−１８"), in_ascii("3½ m²")
    ('-18', '3 1/2 m^2')
    """
    if text.isascii():
        return text
    return _POWERS.sub(r"\1", _NOT_ASCII.sub(lambda found: _character(found[0]), _DASH.sub(", ", text)))


def _character(character: str) -> str:
    if (known := _CHARACTERS.get(character)) is not None:
        return known
    if (digit := unicodedata.decimal(character, None)) is not None:
        return str(digit)
    if unicodedata.category(character) == "So":  # a picture
        return ""
    parts = unicodedata.normalize("NFKC", character).partition("\u2044")  # vulgar fractions, such as ½
    return f" {parts[0]}/{parts[2]}" if parts[1] and parts[2] else character


def unescaped(text: str) -> str:
    r"""Remove doubled backslashes, which data sets have whose JSON was escaped twice; in matrices they end lines.

    >>> unescaped("\\\\frac{1}{2}")
    '\\frac{1}{2}'
    """
    return text if "\\begin" in text or "\\\\" not in text else _DOUBLED.sub(r"\\", text)


def unstyled(text: str) -> str:
    r"""Remove what changes only the looks of LaTeX.

    >>> unstyled(r"\left(1{,}800\,\mathrm{cm}^2\right)")
    '(1,800 cm^2)'
    """
    if "\\" not in text and "{" not in text and "~" not in text:
        return text
    text = _BLANKS.sub(" ", _LAYOUT.sub("", _COLOURED.sub("", text)))
    text = _THOUSANDS.sub(",", _WIDE.sub(" , ", text))
    for _ in range(_DEEPEST):
        if "\\" not in text or (changed := _STYLED.sub(r"\1", text)) == text:
            break
        text = changed
    return text


def unmarked(text: str) -> str:
    """Remove Markdown's emphasis and HTML's tags.

    >>> unmarked("**42 ** and <b>43</b>, `44`, _45_, 3 * 4")
    '42  and 43, 44, 45, 3 * 4'
    """
    if not any(mark in text for mark in "*_`<"):
        return text
    return _THIN.sub("", _EMPHASIS.sub("", _TAG.sub("", text)))
