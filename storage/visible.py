"""Text of unknown origin made safe to look at: what would hide or reorder text is spelled out."""

import re

_RANGES = (
    *((0x00, 0x08), (0x0B, 0x1F), (0x7F, 0x9F)),  # controls but tab and line break
    *((0xAD, 0xAD), (0x061C, 0x061C), (0x180E, 0x180E), (0x200B, 0x200F), (0x2028, 0x202E)),
    *((0x2060, 0x206F), (0xFEFF, 0xFEFF), (0xFFF9, 0xFFFB), (0xE0000, 0xE007F)),
)


def _written(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else chr(code)


HIDDEN = "[" + "".join(f"{_written(first)}-{_written(last)}" for first, last in _RANGES) + "]"
"""Controls but tab and line break, soft hyphens, zero widths, bidi controls, tags; as Python and RE2 both read it."""
_HIDDEN = re.compile(HIDDEN)
_LONE = re.compile(r"[\ud800-\udfff]")
LONGEST_LINE = 2000
"""Characters of a line that is printed or logged."""
_TAIL = 500


def visible(text: str, most: int | None = None) -> str:
    r"""`text` with hidden characters as ⟨U+202E⟩, cut after `most` characters; not yet escaped for HTML.

    >>> visible("abc\u202edef", 5), visible("1\n2")
    ('abc⟨U+202E⟩d … 2 more characters', '1\n2')
    """
    shown = text if most is None else text[:most]
    rest = len(text) - len(shown)
    shown = _HIDDEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", _LONE.sub("\ufffd", shown))
    return f"{shown} … {rest:,} more characters" if rest else shown


def printable(text: str) -> str:
    r"""`text` for a terminal or a log: line by line visible, with the middle of an endless line left out.

    Both ends stay, because messages begin with what is wrong and end with what to do.

    >>> printable("run \x1b[2J\nof 1"), len(printable("x" * 100_000))
    ('run ⟨U+001B⟩[2J\nof 1', 2021)
    """
    if len(text) <= LONGEST_LINE and text.isprintable():
        return text
    return "\n".join(_line(line) for line in text.split("\n"))


def described(error: BaseException, most: int | None = None) -> str:
    """Type and message of an exception, whatever code of somebody else's they are made of; `visible`, as text is.

    >>> described(ValueError("no such file")), described(KeyboardInterrupt())
    ('ValueError: no such file', 'KeyboardInterrupt')
    """
    try:
        message = str(error)
    except Exception as another:  # noqa: BLE001 - the message is made by the exception's own class
        message = f"its message cannot be read ({type(another).__name__})"
    name = type(error).__name__
    return visible(f"{name}: {message}" if message else name, most)


def _line(line: str) -> str:
    if (rest := len(line) - LONGEST_LINE) <= 0:
        return visible(line)
    return f"{visible(line[: -rest - _TAIL])} …{rest:,} characters… {visible(line[-_TAIL:])}"
