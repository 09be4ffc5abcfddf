"""The results of benchmarks, the processor time of processes, and the peak memory of one."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from psutil import Process


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


class ProcessorTime:
    """The processor time of this process and of all below it: what other programs do hardly changes it.

    Calling it returns seconds. Processes count from the last `look` on; what ended keeps what it was last seen with.
    """

    def __init__(self) -> None:
        self._begun, self._seen = dict[int, float](), dict[int, float]()
        self.look()

    def look(self) -> None:
        """Look for new processes, which takes milliseconds."""
        for process in (Process(), *Process().children(recursive=True)):
            if process.pid not in self._begun:
                self._begun[process.pid] = self._seen[process.pid] = _processor_s(process.pid) or 0.0

    def __call__(self) -> float:
        for pid, seen in self._seen.items():
            self._seen[pid] = _processor_s(pid) or seen
        return sum(self._seen.values()) - sum(self._begun.values())


def _processor_s(pid: int) -> float | None:
    """Return the processor time of a process; None if it has ended."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # its clock, as clock_getcpuclockid(3) names it on Linux
    except OSError:
        return None


def peak_memory_mb(process: int | str = "self") -> float:
    """Return the peak memory of a process in MB.

    getrusage is no use: ru_maxrss is inherited through fork and exec, so a child starts with its parent's peak.
    """
    return int(re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())[0]) / 1024
