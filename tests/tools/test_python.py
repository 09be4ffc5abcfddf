"""The tool `python`: what the policy reads, and an interpreter that stays."""

import asyncio
import time
from contextlib import AsyncExitStack

import pytest

from tasks.tools.interface import ToolError
from tasks.tools.sandbox import Sandboxes
from tests.support.sandbox_helpers import descendants, open_tool, run_code, wait_gone

TRACEBACK, IN_LINE_1 = "Traceback (most recent call last):", '  File "<call 1>", line 1, in <module>'
DIVISION = "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("1 + 1", "2\n"),
        ("print('a')\nx = 3\nx", "a\n3\n"),
        ("", ""),
        ("'é\\n☃'", "'é\\n☃'\n"),
        ("len(str(9**9000))", "8589\n"),
        ("import sys; sys.exit()", ""),
        ("import sys; print(1, file=sys.stderr); print(2)", "1\n2\n"),
        ("exit(3)", "error: SystemExit: 3"),
        ("import os; os._exit(7)", "error: the interpreter ended with exit status 7"),
        ("import os; os.kill(os.getpid(), 11)", "error: the interpreter ended with exit status 139"),
        ("import os; os.write(1, b'\\xff')", "\ufffd1\n"),
        ("from dataclasses import dataclass\n@dataclass\nclass A: x: int\nA(1)", "A(x=1)\n"),
        ("print('x' * 9000)", "x" * 2000 + "\n… 5,001 characters left out …\n" + "x" * 1999 + "\n"),
    ],
)
async def test_the_policy_reads_what_a_prompt_would_show(code: str, output: str, sandboxes: Sandboxes) -> None:
    """It reads what was printed, in order, and the value of the last expression."""
    assert await run_code(sandboxes, code) == output


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("print(1)\n1 / 0", ["1", TRACEBACK, '  File "<call 1>", line 2, in <module>', "    1 / 0", DIVISION]),
        ("raise KeyboardInterrupt", [TRACEBACK, IN_LINE_1, "    raise KeyboardInterrupt", "KeyboardInterrupt"]),
        ("input()", [TRACEBACK, IN_LINE_1, "    input()", "EOFError: EOF when reading a line"]),
        ("print(", ['  File "<call 1>", line 1', "    print(", "SyntaxError: '(' was never closed"]),
    ],
)
async def test_a_traceback_begins_in_the_policys_code(code: str, lines: list[str], sandboxes: Sandboxes) -> None:
    """The traceback has source lines, and no frame of the program that executes the code."""
    result = await run_code(sandboxes, code)
    without_marks = [line for line in result.removeprefix("error: ").splitlines() if line.strip(" ^~")]
    assert without_marks == lines


async def test_calls_are_independent_unless_asked(sandboxes: Sandboxes) -> None:
    """By default a call sees nothing of the one before; a stateful tool keeps variables, imports and functions."""
    setting, using = "import math\ndef f(x): return math.factorial(x)\nn = 5", "f(n) if 'f' in globals() else None"
    for stateful, result in ((False, ""), (True, "120\n")):
        async with open_tool(sandboxes, stateful=stateful) as tool:
            await tool.call({"code": setting})
            assert await tool.call({"code": using}) == result


@pytest.mark.parametrize("end", ["while True: pass", "import os; os._exit(1)", "while True: print('x' * 1000)"])
async def test_after_a_limit_a_new_interpreter_begins(end: str, sandboxes: Sandboxes) -> None:
    """A call that is stopped costs the variables, says so, and no more."""
    async with open_tool(sandboxes, stateful=True, timeout_s=1) as tool:
        await tool.call({"code": "x = 1"})
        with pytest.raises(ToolError, match="the variables are lost: the next call begins a new interpreter"):
            await tool.call({"code": end})
        assert await tool.call({"code": "'x' in globals()"}) == "False\n"


async def test_a_call_that_is_cancelled_leaves_no_process(sandboxes: Sandboxes) -> None:
    """An episode may end at its deadline in the middle of a call."""
    async with open_tool(sandboxes, stateful=True) as tool:
        await tool.call({"code": "x = 1"})
        inside = descendants()
        call = asyncio.create_task(tool.call({"code": "import time; time.sleep(1000)"}))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        wait_gone(inside)
        assert await tool.call({"code": "'x' in globals()"}) == "False\n"
        inside = descendants()
    wait_gone(inside)


async def test_code_that_forges_the_end_of_its_call_harms_only_itself(sandboxes: Sandboxes) -> None:
    """It can read the token that ends a call; the answer is then shorter, and the next call works."""
    forge = """
import os, sys
frame = sys._getframe()
while "token" not in frame.f_locals:
    frame = frame.f_back
print("forged")
os.write(1, frame.f_locals["token"] + b" 0" * 1000)
"""
    async with open_tool(sandboxes, stateful=True) as tool:
        assert await tool.call({"code": forge}) == "forged\n"
        assert (await tool.call({"code": "1 + 1"})).endswith("2\n")


async def test_code_that_closes_its_descriptors_only_ends_its_call(sandboxes: Sandboxes) -> None:
    code = "import os\nos.closerange(0, 60)"
    assert "the interpreter ended with exit status" in await run_code(sandboxes, code)
    assert await run_code(sandboxes, f"{code}\nwhile True: pass", timeout_s=0.5) == "error: stopped after 0.5 s"


async def test_packages_are_there_if_asked_for(sandboxes: Sandboxes) -> None:
    """numpy and sympy can be imported, within the default limits; nothing else that is installed here can."""
    code = "import numpy, sympy\nprint(sympy.sqrt(8), numpy.arange(3).sum())\nimport pydantic"
    result = await run_code(sandboxes, code, packages=True, timeout_s=60)
    assert result.startswith("error: 2*sqrt(2) 3\n")
    assert result.endswith("ModuleNotFoundError: No module named 'pydantic'")
    assert "No module named 'numpy'" in await run_code(sandboxes, "import numpy")


@pytest.mark.usefixtures("sandboxes")
async def test_many_at_once_wait_for_slots() -> None:
    """More calls than slots only take longer; a time limit begins when a call does.

    An interpreter that stays needs no slot between calls: episodes beyond their number would wait for others to end.
    """
    start = time.monotonic()
    few, code = Sandboxes(most_at_once=2), "import time; time.sleep(0.3)"
    assert await asyncio.gather(*(run_code(few, code, timeout_s=20) for _ in range(6))) == [""] * 6
    assert time.monotonic() - start >= 0.9
    one = Sandboxes(most_at_once=1)
    async with AsyncExitStack() as stack, asyncio.timeout(60):
        tools = [await stack.enter_async_context(open_tool(one, stateful=True, timeout_s=60)) for _ in range(3)]
        for code, results in (("x = 1", [""] * 3), ("x", ["1\n"] * 3)):
            assert await asyncio.gather(*(tool.call({"code": code}) for tool in tools)) == results
