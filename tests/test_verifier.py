"""The judge: right verdicts, and no answer that can hang, kill or outlive it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tasks.rewards.verifier import Verdict, Verifier

ENDLESS = "$9^{9^{9^{9}}}$"
MATH_500_HELP = (
    "put MATH-500's test.jsonl (data set HuggingFaceH4/MATH-500) into math_500/ and set TEST_DATA to the folder above"
)


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier(workers=2, timeout_s=30) as verifier:
        yield verifier


def judges_of(pid: int) -> set[int]:
    return {child.pid for child in psutil.Process(pid).children() if "spawn_main" in " ".join(child.cmdline())}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_the_end(pids: set[int], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while left := {pid for pid in pids if alive(pid)}:
        assert time.monotonic() < deadline, f"processes {left} are still there"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("answer", "solutions", "name", "extracted", "solution"),
    [
        (r"so it is \boxed{19}.", ["19"], "correct", "19", "19"),
        ("1/2", ["0.5"], "correct", "1/2", "0.5"),
        ("0.5", [r"\frac12"], "correct", "0.5", r"\frac12"),
        (r"$\frac12$", ["1/2"], "correct", r"\frac{1}{2}", "1/2"),
        (r"\boxed{0.75}", [r"\frac{3}{4}"], "correct", "0.75", r"\frac{3}{4}"),
        (r"\boxed{(x+1)^2}", ["$x^2+2x+1$"], "correct", "(x+1)^2", "$x^2+2x+1$"),
        (r"\boxed{7}", ["5", "7"], "correct", "7", "7"),
        (r"\boxed{7}", [r"\text{", "7"], "correct", "7", "7"),
        (r"\boxed{8}", ["5", "7"], "wrong", "8", "5"),
        (r"\boxed{19}. No, it must be even: \boxed{20}", ["19"], "wrong", "19,20", "19"),
        ("x" * 100_000 + r"\boxed{5}", ["5"], "correct", "5", "5"),
        ("I give up", ["5"], "unparsable", "", "5"),
        ("", ["5"], "unparsable", "", "5"),
        ("{" * 20_000, ["5"], "unparsable", "", "5"),
        ("1" * 20_000, ["5"], "unparsable", "", "5"),
        ("\ud800 \\boxed{5}", ["5"], "correct", "5", "5"),
        ("\\boxed{5\ud800}", ["5"], "wrong", "5?", "5"),
        ("\\boxed{\x005}", ["5"], "wrong", "\x005", "5"),
        (r"\boxed{5}", ["", "$"], "error", "", ""),
    ],
)
def test_verdict_table(
    verifier: Verifier, answer: str, solutions: list[str], name: str, extracted: str, solution: str
) -> None:
    """Equivalent forms, several solutions, and text that is hardly text get the verdict a person would give."""
    verdict = verifier.judge([(answer, solutions)])[0]
    assert (verdict.name, verdict.extracted, verdict.solution) == (name, extracted, solution)
    assert verdict.success == (name == "correct")
    verdict.reason.encode()  # can be stored, whatever the answer was


def test_reasons_name_the_culprit(verifier: Verifier) -> None:
    """A bad solution or answer is found from the score data alone."""
    bad_gold, bad_answer = verifier.judge([("5", [""]), ("no number", ["5"])])
    assert "no expression in solution" in bad_gold.reason
    assert bad_answer.reason == "no expression in answer 'no number'"


def test_a_timeout_hits_only_the_guilty() -> None:
    """Endless answers cost their own verdicts, not those of the answers sent along with them."""
    pairs = [(rf"\boxed{{{number}}}", ["7"]) for number in range(12)]
    pairs[3:3] = [(ENDLESS, ["7"])]
    pairs[9:9] = [("\\boxed{" + "{" * 5000 + "1" + "}" * 5000 + "}", ["7"])]
    with Verifier(workers=1, timeout_s=2) as verifier:
        verdicts = verifier.judge(pairs)
        expected = ["wrong"] * 12
        expected[7] = "correct"
        assert [verdict.name for verdict in verdicts] == [
            *expected[:3],
            "timeout",
            *expected[3:8],
            "timeout",
            *expected[8:],
        ]
        assert verdicts[3].reason == "took longer than 2 s"
        start = time.monotonic()
        assert verifier.judge([(ENDLESS, ["7"])]) == [verdicts[3]]
        assert time.monotonic() - start < 2, "a timeout is cached like any verdict"


def test_memory_limit() -> None:
    """An answer that needs more memory than allowed is an error of its own; its neighbours are judged."""
    huge = "and so on " * 4_000_000
    with Verifier(workers=1, memory_mb=32, timeout_s=30) as verifier:
        verdicts = verifier.judge([(r"\boxed{5}", ["5"]), (huge, ["5"]), (r"\boxed{6}", ["5"])])
    assert [verdict.name for verdict in verdicts] == ["correct", "error", "wrong"]
    assert verdicts[1].reason == "needs more than 32 MB"


def test_a_death_from_outside_costs_nothing() -> None:
    """A judge killed by somebody else is replaced, and the pair is judged after all."""
    before = judges_of(os.getpid())
    with Verifier(workers=2) as verifier:
        verifier.judge([("1", ["1"])])
        first, *_ = judges_of(os.getpid()) - before
        os.kill(first, signal.SIGKILL)
        verdicts = verifier.judge([(str(number), [str(number)]) for number in range(40)])
        assert {verdict.name for verdict in verdicts} == {"correct"}


def test_each_distinct_pair_is_judged_once() -> None:
    """The cache holds within a batch, across batches, and between waiting coroutines; it is bounded."""
    with Verifier(workers=2, cache_size=2) as verifier:
        group = [(r"\boxed{4}", ["4"])] * 15 + [(r"\boxed{5}", ["4"])]
        verdicts = verifier.judge(group)
        assert verifier.sent == 2
        assert verifier.judge(group) == verdicts
        assert verifier.sent == 2
        verifier.judge([(r"\boxed{4}", ["4", "5"])])  # other solutions: another pair, and one more than is kept
        assert verifier.sent == 3
        verifier.judge(group)
        assert verifier.sent == 4


async def test_async_equals_sync(verifier: Verifier) -> None:
    """Hundreds of awaits get the verdicts of the batch, judge each pair once, and leave the loop responsive."""
    pairs = [(rf"\boxed{{{number % 40}}}", [str(number % 3)]) for number in range(400)]
    before = verifier.sent
    waiting = asyncio.gather(*(verifier.judge_async(*pair) for pair in pairs))
    ticks = 0
    while not waiting.done():
        await asyncio.sleep(0.001)
        ticks += 1
    assert verifier.sent - before <= len({(answer, solutions[0]) for answer, solutions in pairs})
    assert ticks > 1
    assert await waiting == verifier.judge(pairs)


async def test_a_cancelled_wait_cancels_nobody_else(verifier: Verifier) -> None:
    """An episode that hits its deadline does not take the verdict away from its group."""
    pair = (r"\boxed{31415}", ["31415"])
    first, second = (asyncio.create_task(verifier.judge_async(*pair)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).name == "correct"
    assert first.cancelled()


def test_close_ends_the_processes_and_the_waiting() -> None:
    """Nothing is left behind, not even by an endless answer, and nobody waits for ever."""
    before = judges_of(os.getpid())
    verifier = Verifier(workers=2, timeout_s=60)
    verifier.judge([("1", ["1"]), ("2", ["2"])])
    waiting = verifier._submit([(ENDLESS, ["1"]), (ENDLESS, ["2"])])
    judges = judges_of(os.getpid()) - before
    assert judges
    start = time.monotonic()
    verifier.close()
    assert time.monotonic() - start < 10
    assert not [pid for pid in judges if alive(pid)]
    for future in waiting:
        with pytest.raises(RuntimeError, match="closed"):
            future.result()
    with pytest.raises(RuntimeError, match="closed"):
        verifier.judge([("3", ["3"])])


PARENT = f"""
from tasks.rewards.verifier import Verifier
verifier = Verifier(workers=2, timeout_s=2)
verifier.judge([("1", ["1"]), ("2", ["2"])])
verifier._submit([({ENDLESS!r}, ["1"])])
print("ready", flush=True)
verifier.judge([({ENDLESS!r}, ["1"])])
"""


def test_judges_end_with_a_killed_parent() -> None:
    """A kill -9 of the parent leaves no judge, neither an idle one nor one inside an endless answer."""
    root = Path(__file__).parents[1]
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=root, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    judges = judges_of(parent.pid)
    assert judges
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for_the_end(judges, limit_s=10)


def test_nonsense_is_refused(verifier: Verifier) -> None:
    """A string of solutions would count each of its characters; no solution makes every answer wrong."""
    for solutions in ["19", []]:
        with pytest.raises(ValueError, match="must be a list of 1 or more gold answers"):
            verifier.judge([("19", solutions)])


def test_math_500_golds_are_correct() -> None:
    """Real solutions, boxed as an answer, are correct against themselves, all 500 of them."""
    path = (
        Path(os.environ.get("TEST_DATA") or Path(__file__).parents[2] / "shared" / "data") / "math_500" / "test.jsonl"
    )
    if not path.is_file():
        reason = f"no {path}: {MATH_500_HELP}"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    golds = [json.loads(line)["answer"] for line in path.read_text().splitlines()]
    with Verifier(timeout_s=30) as verifier:
        verdicts = verifier.judge([(f"\\boxed{{{gold}}}", [gold]) for gold in golds])
    failed: dict[str, Verdict] = {
        gold: verdict for gold, verdict in zip(golds, verdicts, strict=True) if verdict.name != "correct"
    }
    assert len(golds) == 500
    assert failed == {}


def test_a_closed_verifier_answers_everybody() -> None:
    """Two who ask for the same pair after its end both hear of it: none waits for an answer that cannot come."""
    verifier = Verifier(workers=1)
    verifier.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            verifier.judge([("1", ["1"])])
