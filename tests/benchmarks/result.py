"""The results of benchmarks, and the peak memory of a process."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table of results.

    Example: Row("rollout", "0.91", "512 episodes in 0.66 s, bare 0.60 s")
    """

    benchmark: str
    measured: str
    detail: str = ""


def spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    """Format the median and the range.

    >>> spread([1.0, 2.0, 4.0], "{:.1f}".format)
    '2.0 (1.0 to 4.0)'
    """
    return f"{show(median(values))} ({show(min(values))} to {show(max(values))})"


def peak_memory_mb(process: int | str = "self") -> float:
    """Return the peak memory of a process in MB.

    getrusage is no use: ru_maxrss is inherited through fork and exec, so a child starts with its parent's peak.
    """
    return int(re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())[0]) / 1024
