"""Processes whose clock is wrong."""

from pathlib import Path

import pytest

LIBRARY = next(iter(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")), None)
need_library = pytest.mark.skipif(LIBRARY is None, reason="needs libfaketime: apt-get install libfaketime")


def wrong_clock(seconds: int, preload: str = "LD_PRELOAD") -> dict[str, str]:
    """Return variables for a process whose clock is wrong by some seconds; its monotonic clock is not.

    Args:
        seconds: positive if it is ahead.
        preload: the variable that names the library.
    """
    return {preload: str(LIBRARY), "FAKETIME": f"{seconds:+d}", "DONT_FAKE_MONOTONIC": "1"}
