"""Makes texts of unknown origin, and errors, fit for messages.

Characters that hide or reorder text are written as their codes, secrets are left out, and an error is told with the
line of the user's own code in its traceback.
"""

import contextlib
import logging
import os
import re
import sysconfig
import traceback
from pathlib import Path

from configs.safety import SECRET

_RANGES = (
    *((0x00, 0x08), (0x0B, 0x1F), (0x7F, 0x9F)),  # controls except tab and line break
    *((0xAD, 0xAD), (0x061C, 0x061C), (0x180E, 0x180E), (0x200B, 0x200F), (0x2028, 0x202E)),
    *((0x2060, 0x206F), (0xFEFF, 0xFEFF), (0xFFF9, 0xFFFB), (0xE0000, 0xE007F)),
)


def _written(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else chr(code)


HIDDEN = "[" + "".join(f"{_written(first)}-{_written(last)}" for first, last in _RANGES) + "]"
"""A character class for Python and RE2: controls except tab and line break, soft hyphens, zero widths, bidi controls,
tags."""
_HIDDEN = re.compile(HIDDEN)
_LONE = re.compile(r"[\ud800-\udfff]")
LONGEST_LINE = 2000
"""Most characters of a line that is printed or logged."""
_TAIL = 500
_OTHER_SECRETS = re.compile(r"_(?:auth_string|headers)$", re.IGNORECASE)
_SHORTEST = 6
"""Characters of the shortest secret: words such as `none`, which stand for no key, are none."""
_PARTS = re.compile(r"(?<![^\s=:,])[^\s=:,]++(?=,|$)")  # tried once for each part, which may be a long key
_PASSWORDS = re.compile(r"://[^\s/:@]*:([^\s/@]+)@")


class Fleeting(str):
    """A line of progress that the next one replaces: a terminal shows it in the bar, a file gets one now and then."""


def visible(text: str, most: int | None = None) -> str:
    r"""Write hidden characters of `text` like ⟨U+202E⟩ and cut it after `most` characters; escapes nothing for HTML.

    >>> visible("abc\u202edef", 5), visible("1\n2")
    ('abc⟨U+202E⟩d … 2 more characters', '1\n2')
    """
    shown = text if most is None else text[:most]
    rest = len(text) - len(shown)
    shown = _HIDDEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", _LONE.sub("\ufffd", shown))
    return f"{shown} … {rest:,} more characters" if rest else shown


def printable(text: str) -> str:
    r"""Make `text` visible for a terminal or a log, line by line, and leave out the middle of very long lines.

    Both ends of a line stay, because messages begin with what is wrong and end with what to do.

    >>> printable("run \x1b[2J\nof 1"), len(printable("x" * 100_000))
    ('run ⟨U+001B⟩[2J\nof 1', 2021)
    """
    if len(text) <= LONGEST_LINE and text.isprintable():
        return text
    return "\n".join(_line(line) for line in text.split("\n"))


def without_secrets(text: str) -> str:
    """Replace the values of secret environment variables in what another program wrote, such as a service.

    Secret are variables whose names end like `JUDGE_API_KEY`, `HF_TOKEN`, `OTEL_EXPORTER_OTLP_HEADERS`, and passwords
    in URLs, but not the paths of files that hold one. Whoever has a secret can write it in a form that is not
    recognised; this is against echoes.
    """
    found = list[tuple[str, str]]()
    for name, value in os.environ.items():
        is_secret = name != "PWD" and (SECRET.search(name) or _OTHER_SECRETS.search(name))
        parts = [value, *_PARTS.findall(value)] if is_secret else _PASSWORDS.findall(value)
        long = (part for part in parts if len(part) >= _SHORTEST)
        found += [(part, name) for part in long if not (os.path.isabs(part) and os.path.exists(part))]
    for part, name in sorted(found, key=lambda each: len(each[0]), reverse=True):
        text = text.replace(part, f"⟨{name}⟩")
    return text


def described(error: BaseException, most: int | None = None) -> str:
    """Return type and message of an exception, made visible and without secrets. If it fails to give one, say so.

    >>> described(ValueError("no such file")), described(KeyboardInterrupt())
    ('ValueError: no such file', 'KeyboardInterrupt')
    """
    try:
        message = str(error)
    except Exception as another:  # noqa: BLE001 - the exception's own class makes the message and may raise anything
        message = f"its message cannot be read ({type(another).__name__})"
    name = type(error).__name__
    return visible(f"{name}: {without_secrets(message)}" if message else name, most)


def print_clean_logs() -> None:
    """Let all handlers of logs print what is `printable` and no secret: names and errors may hold any text."""
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    handlers = {handler for logger in loggers if isinstance(logger, logging.Logger) for handler in logger.handlers}
    for handler in filter(None, {*handlers, logging.lastResort}):
        handler.addFilter(_clean)


def _clean(record: logging.LogRecord) -> bool:
    """Make a record printable, without secrets: a filter that lets everything pass."""
    record.name = printable(record.name)
    with contextlib.suppress(TypeError, ValueError):  # wrong arguments, which logging itself reports
        message = record.getMessage()
        if (shown := printable(without_secrets(message))) != message:
            record.msg, record.args = shown, ()
    if record.exc_info and record.exc_info[0]:
        trace = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
        if (shown := printable(without_secrets(trace))) != trace:
            record.exc_text = shown
    return True


def _line(line: str) -> str:
    if (rest := len(line) - LONGEST_LINE) <= 0:
        return visible(line)
    return f"{visible(line[: -rest - _TAIL])} …{rest:,} characters… {visible(line[-_TAIL:])}"


_ROOT = Path(__file__).parents[1]
_OURS = tuple(f"{_ROOT / name}{os.sep}" for name in ("configs", "flows", "storage", "tasks"))
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib"))


def _is_own(filename: str) -> bool:
    """Return whether a file is the user's own: not this project's, not a library's, not made by `exec`."""
    return not filename.startswith((*_OURS, *_LIBRARIES, "<")) and "site-packages" not in filename


def with_own_line(text: str, error: BaseException) -> str:
    """Add the user's own line, such as "maze.py:14 in reset", to a text about an error or about one that it came from.

    It is the last one of the traceback that is neither this project's nor a library's, if there is one.
    """
    each: BaseException | None = error
    frames: list[traceback.FrameSummary] = []
    while each and not frames:
        frames = [frame for frame in traceback.extract_tb(each.__traceback__) if _is_own(frame.filename)]
        each = each.__cause__ or each.__context__
    place = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return f"{text} ({place})" if place and place not in text else text


def of_library(error: BaseException) -> bool:
    """Return whether a library raised an error: neither this project, whose messages say what to do, nor the user."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and not (frames[-1].filename.startswith(_OURS) or _is_own(frames[-1].filename))


def traceback_without(error: BaseException, package: str) -> str:
    """Format an error with its traceback, but for the lines of a package."""
    frame = rf'  File "[^"]*{os.sep}{package}{os.sep}[^"]*", line \d+.*\n(?: {{4}}.*\n)*'
    return re.sub(frame, "", "".join(traceback.format_exception(error))).rstrip("\n")
