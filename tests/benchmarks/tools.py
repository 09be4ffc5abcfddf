"""Calls of the python tool: each in a sandbox of its own, or in an interpreter that stays."""

import asyncio
import time
from typing import TYPE_CHECKING

from tests.benchmarks.fixtures import Lab
from tests.benchmarks.result import Row, spread

if TYPE_CHECKING:
    from tasks.tools.interface import ToolContext

AT_ONCE, EACH, REPEATS = 16, 20, 5
CODE = "print(sum(n * n for n in range(1000)))"


def measure(_: Lab) -> list[Row]:
    """Measure calls/s: `EACH` of `AT_ONCE` episodes in new sandboxes, and as many of one interpreter that stays."""
    from tasks.tools.interface import ToolContext
    from tasks.tools.sandbox import Sandboxes

    context = ToolContext(Sandboxes())
    context.sandboxes.check()
    fresh = [asyncio.run(_calls_per_s(context, AT_ONCE, stateful=False)) for _ in range(REPEATS)]
    kept = [asyncio.run(_calls_per_s(context, 1, stateful=True)) for _ in range(REPEATS)]
    return [
        Row(f"python tool, {AT_ONCE} calls at a time: calls/s", spread(fresh, "{:.0f}".format), "in new sandboxes"),
        Row("stateful python tool: calls/s", spread(kept, "{:,.0f}".format), "one interpreter, one call at a time"),
    ]


async def _calls_per_s(context: "ToolContext", at_once: int, *, stateful: bool) -> float:
    from tasks.tools.python import PythonTool

    async def episode(tool: PythonTool) -> None:
        for _ in range(EACH):
            assert await tool.call({"code": CODE}) == "332833500\n"

    tools = [PythonTool(context, stateful=stateful, timeout_s=60) for _ in range(at_once)]
    if stateful:
        await asyncio.gather(*(tool.call({"code": "1"}) for tool in tools))  # starts the interpreters
    start = time.perf_counter()
    await asyncio.gather(*map(episode, tools))
    rate = at_once * EACH / (time.perf_counter() - start)
    for tool in tools:
        await tool.close()
    return rate
