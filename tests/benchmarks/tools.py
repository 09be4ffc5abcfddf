"""Calls of the python tool: each in a sandbox of its own, or in an interpreter that stays."""

import asyncio
import resource
import time
from statistics import median
from typing import TYPE_CHECKING

from tests.benchmarks.fixtures import Lab
from tests.benchmarks.result import Row, spread

if TYPE_CHECKING:
    from tasks.tools.interface import ToolContext

GOAL = 50.0  # calls/s, on two cores
AT_ONCE, EACH = 16, 20
MANY_AT_ONCE = 200
KEPT_CALLS = 1000
REPEATS = 5
CODE = "print(sum(n * n for n in range(1000)))"


def measure(_: Lab) -> list[Row]:
    """Measure calls/s, and the processor time that this process itself needs for a call."""
    from tasks.tools.interface import ToolContext
    from tasks.tools.sandbox import Sandboxes

    context = ToolContext(Sandboxes())
    context.sandboxes.check()
    return [_stateless(context), _stateful(context), _many(context)]


def _stateless(context: "ToolContext") -> Row:
    runs = [asyncio.run(_calls_each_anew(context, AT_ONCE, EACH)) for _ in range(REPEATS)]
    rates, own = [rate for rate, _ in runs], median(seconds for _, seconds in runs)
    return Row(
        benchmark=f"python tool, {AT_ONCE} calls at a time: calls/s",
        measured=spread(rates, "{:.0f}".format),
        goal=f"{GOAL:g} or more",
        met=median(rates) >= GOAL,
        detail=f"each in a new sandbox; {own * 1000:.1f} ms of a call are this process's own processor time",
    )


def _many(context: "ToolContext") -> Row:
    rate, _ = asyncio.run(_calls_each_anew(context, MANY_AT_ONCE, 2))
    return Row(f"python tool, {MANY_AT_ONCE} calls at a time: calls/s", f"{rate:.0f}", detail="once")


def _stateful(context: "ToolContext") -> Row:
    rates = [asyncio.run(_calls_of_one(context)) for _ in range(REPEATS)]
    detail = f"{KEPT_CALLS} calls, one after the other, of one interpreter that stays"
    return Row("stateful python tool: calls/s", spread(rates, "{:,.0f}".format), detail=detail)


async def _calls_each_anew(context: "ToolContext", at_once: int, each: int) -> tuple[float, float]:
    """Return calls/s, and the processor time of this process for one call."""
    from tasks.tools.python import PythonTool

    async def episode() -> None:
        tool = PythonTool(context, timeout_s=60)
        for _ in range(each):
            assert await tool.call({"code": CODE}) == "332833500\n"

    start, used = time.perf_counter(), _processor_time()
    await asyncio.gather(*(episode() for _ in range(at_once)))
    calls = at_once * each
    return calls / (time.perf_counter() - start), (_processor_time() - used) / calls


async def _calls_of_one(context: "ToolContext") -> float:
    from tasks.tools.python import PythonTool

    tool = PythonTool(context, stateful=True, timeout_s=60)
    await tool.call({"code": "1"})
    start = time.perf_counter()
    for _ in range(KEPT_CALLS):
        await tool.call({"code": CODE})
    rate = KEPT_CALLS / (time.perf_counter() - start)
    await tool.close()
    return rate


def _processor_time() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
