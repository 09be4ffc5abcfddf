"""Find the line of a user's own code in the traceback of an error."""

import os
import re
import sysconfig
import traceback
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_OURS = tuple(f"{_ROOT / name}{os.sep}" for name in ("configs", "flows", "storage", "tasks"))
_LIBRARIES = tuple(
    f"{path}{os.sep}" for path in {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
)


def is_own(filename: str) -> bool:
    """Return whether a file is the user's own: not this project's, not a library's, not made by `exec`."""
    return not filename.startswith((*_OURS, *_LIBRARIES, "<")) and "site-packages" not in filename


def with_own_line(text: str, error: BaseException) -> str:
    """Add the user's own line, such as "maze.py:14 in reset", to a text about an error or about one that it came from.

    It is the last one of the traceback that is neither this project's nor a library's, if there is one.
    """
    each: BaseException | None = error
    frames: list[traceback.FrameSummary] = []
    while each and not frames:
        frames = [frame for frame in traceback.extract_tb(each.__traceback__) if is_own(frame.filename)]
        each = each.__cause__ or each.__context__
    place = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return f"{text} ({place})" if place and place not in text else text


def of_library(error: BaseException) -> bool:
    """Return whether a library raised an error: neither this project, whose messages say what to do, nor the user."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and not (frames[-1].filename.startswith(_OURS) or is_own(frames[-1].filename))


def traceback_without(error: BaseException, package: str) -> str:
    """Format an error with its traceback, but for the lines of a package."""
    frame = rf'  File "[^"]*{os.sep}{package}{os.sep}[^"]*", line \d+.*\n(?: {{4}}.*\n)*'
    return re.sub(frame, "", "".join(traceback.format_exception(error))).rstrip("\n")
