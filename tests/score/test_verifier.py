"""The judge: right verdicts, and no answer that can hang, kill or outlive it."""

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.score.verifier import Verdict, Verifier
from tests.support.paths import ROOT

ENDLESS = "$9^{9^{9^{9}}}$"


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


def slow(terms: int) -> tuple[str, list[str]]:
    """A right answer and its solutions; 80 terms take about a second of processor time."""
    powers = [f"x^{{{power}}}" for power in range(terms)]
    return f"${'+'.join(powers)}$", [f"${'+'.join(reversed(powers))}$"]


@pytest.fixture
def others() -> set[int]:
    """Judges that were there before the test."""
    return judges_of(os.getpid())


def stop_in_the_act(verifier: Verifier, others: set[int]) -> "tuple[int, Future[Verdict]]":
    """Stop the only judge while it works on a right answer; which judge that is, and the verdict to come."""
    for terms in itertools.count(40):
        verifier.grade([(str(terms), [str(terms)])])
        (judge,) = judges_of(os.getpid()) - others
        process = psutil.Process(judge)
        begun = process.cpu_times().user
        (waiting,) = verifier._submit([slow(terms)])
        while process.cpu_times().user < begun + 0.1 and not waiting.done():
            time.sleep(0.01)
        process.suspend()
        if not waiting.done():  # not too late
            return judge, waiting
        process.resume()
    raise AssertionError


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
    verdict = verifier.grade([(answer, solutions)])[0]
    assert (verdict.name, verdict.extracted, verdict.solution) == (name, extracted, solution)
    assert verdict.success == (name == "correct")
    verdict.reason.encode()  # can be stored, whatever the answer was


def test_reasons_name_the_culprit(verifier: Verifier) -> None:
    """A bad solution or answer is found from the score data alone."""
    bad_gold, bad_answer = verifier.grade([("5", [""]), ("no number", ["5"])])
    assert "no expression in solution" in bad_gold.reason
    assert bad_answer.reason == "no expression in answer 'no number'"


def test_a_timeout_hits_only_the_guilty() -> None:
    """Endless answers cost their own verdicts, not those of the answers sent along with them."""
    pairs = [(rf"\boxed{{{number}}}", ["7"]) for number in range(12)]
    pairs[3:3] = [(ENDLESS, ["7"])]
    pairs[9:9] = [("\\boxed{" + "{" * 5000 + "1" + "}" * 5000 + "}", ["7"])]
    with Verifier(workers=1, timeout_s=2) as verifier:
        verdicts = verifier.grade(pairs)
        expected = ["wrong"] * 12
        expected[7] = "correct"
        assert [verdict.name for verdict in verdicts] == [
            *expected[:3],
            "timeout",
            *expected[3:8],
            "timeout",
            *expected[8:],
        ]
        assert verdicts[3].reason == "needs more than 2 s of processor time"


def test_a_timeout_is_not_kept() -> None:
    """An answer that timed out is judged anew whenever it is asked for: the next verdict may be another."""
    with Verifier(workers=1, timeout_s=0.5) as verifier:
        for times in (1, 2):
            assert verifier.grade([(ENDLESS, ["7"])])[0].name == "timeout"
            assert verifier.sent == times


def test_a_stall_is_no_timeout(others: set[int]) -> None:
    """While a judge is stopped no time runs out: once it goes on, its answer is correct."""
    with Verifier(workers=1, timeout_s=3) as verifier:
        stopped, waiting = stop_in_the_act(verifier, others)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=5)
        os.kill(stopped, signal.SIGCONT)
        assert waiting.result().name == "correct"


@pytest.mark.parametrize("killed", [True, False])
def test_a_judge_that_never_goes_on_costs_nothing(killed: bool, others: set[int]) -> None:
    """An answer whose judge is killed, or stopped for ever, is judged again by another one."""
    with Verifier(workers=1) as verifier:
        verifier._patience_s = 5
        stopped, waiting = stop_in_the_act(verifier, others)
        verifier._patience_s = 600
        if killed:
            os.kill(stopped, signal.SIGKILL)
        assert waiting.result().name == "correct"


def test_waiting_has_an_end() -> None:
    """An answer whose judges all get nowhere is a timeout at last, and judged anew when it is asked for again."""
    with Verifier(workers=1, timeout_s=600) as verifier:
        verifier._patience_s = 0.1
        verdict = verifier.grade([slow(300)])[0]
        assert (verdict.name, verdict.reason) == ("timeout", "no end within 0.1 s, 3 times")
        verifier._patience_s = 600
        verifier.grade([("1", ["1"])])
        assert verifier.grade([slow(80)])[0].name == "correct"


def test_memory_limit() -> None:
    """An answer that needs more memory than allowed is an error of its own; its neighbours are judged."""
    huge = f"${'x' * 20_000_000}$"  # fails within a second of processor time
    with Verifier(workers=1, memory_mb=32, timeout_s=30) as verifier:
        verdicts = verifier.grade([(r"\boxed{5}", ["5"]), (huge, ["5"]), (r"\boxed{6}", ["5"])])
    assert [verdict.name for verdict in verdicts] == ["correct", "error", "wrong"]
    assert verdicts[1].reason == "needs more than 32 MB"


def test_a_death_from_outside_costs_nothing() -> None:
    """A judge killed by somebody else is replaced, and the pair is judged after all."""
    before = judges_of(os.getpid())
    with Verifier(workers=2) as verifier:
        verifier.grade([("1", ["1"])])
        first, *_ = judges_of(os.getpid()) - before
        os.kill(first, signal.SIGKILL)
        verdicts = verifier.grade([(str(number), [str(number)]) for number in range(40)])
        assert {verdict.name for verdict in verdicts} == {"correct"}


class BrokenPool:
    """A pool that breaks under every answer."""

    def schedule(self, *_: Any, **__: Any) -> "Future[Any]":
        broken: Future[Any] = Future()
        broken.set_exception(BrokenProcessPool("All workers expired"))
        return broken


def test_a_pool_that_breaks_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that a pool took with it go to the next one; who waits hears of it where none stands."""
    with Verifier(workers=1) as verifier:
        whole, broken = verifier._active_pool, iter([BrokenPool()] * 5)
        monkeypatch.setattr(verifier, "_active_pool", lambda: next(broken, None) or whole())
        with pytest.raises(RuntimeError, match="broke: BrokenProcessPool"):
            verifier.grade([("1", ["1"])])
        assert verifier.grade([("1", ["1"])])[0].name == "correct"


def test_each_distinct_pair_is_judged_once() -> None:
    """The cache holds within a batch, across batches, and between waiting coroutines; it is bounded."""
    with Verifier(workers=2, cache_size=2) as verifier:
        group = [(r"\boxed{4}", ["4"])] * 15 + [(r"\boxed{5}", ["4"])]
        verdicts = verifier.grade(group)
        assert verifier.sent == 2
        assert verifier.grade(group) == verdicts
        assert verifier.sent == 2
        verifier.grade(group[:1])  # so that the other one was asked for longest ago
        verifier.grade([(r"\boxed{4}", ["4", "5"])])  # other solutions: another pair, and one more than is kept
        assert verifier.sent == 3
        verifier.grade(group[:1])
        assert verifier.sent == 3
        verifier.grade(group)
        assert verifier.sent == 4


async def test_async_equals_sync(verifier: Verifier) -> None:
    """Hundreds of awaits get the verdicts of the batch, judge each pair once, and leave the loop responsive."""
    pairs = [(rf"\boxed{{{number % 40}}}", [str(number % 3)]) for number in range(400)]
    before = verifier.sent
    waiting = asyncio.gather(*(verifier.grade_async(*pair) for pair in pairs))
    ticks = 0
    while not waiting.done():
        await asyncio.sleep(0.001)
        ticks += 1
    assert verifier.sent - before <= len({(answer, solutions[0]) for answer, solutions in pairs})
    assert ticks > 1
    assert await waiting == verifier.grade(pairs)


async def test_a_cancelled_wait_cancels_nobody_else(verifier: Verifier) -> None:
    """An episode that hits its deadline does not take the verdict away from its group."""
    pair = (r"\boxed{31415}", ["31415"])
    first, second = (asyncio.create_task(verifier.grade_async(*pair)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).name == "correct"
    assert first.cancelled()


def test_close_ends_the_processes_and_the_waiting() -> None:
    """Nothing is left behind, not even by an endless answer, and nobody waits for ever."""
    before = judges_of(os.getpid())
    verifier = Verifier(workers=2, timeout_s=60)
    verifier.grade([("1", ["1"]), ("2", ["2"])])
    waiting = verifier._submit([(ENDLESS, ["1"]), (ENDLESS, ["2"])])
    judges = judges_of(os.getpid()) - before
    assert judges
    start = time.monotonic()
    verifier.close()
    assert time.monotonic() - start < 50  # not as long as an answer may take
    assert not [pid for pid in judges if alive(pid)]
    for future in waiting:
        with pytest.raises(RuntimeError, match="closed"):
            future.result()
    with pytest.raises(RuntimeError, match="closed"):
        verifier.grade([("3", ["3"])])


PARENT = f"""
from tasks.score.verifier import Verifier
verifier = Verifier(workers=2, timeout_s=600)
verifier.grade([("1", ["1"]), ("2", ["2"])])
verifier._submit([({ENDLESS!r}, ["1"])])
print("ready", flush=True)
verifier.grade([({ENDLESS!r}, ["1"])])
"""


def test_judges_end_with_a_killed_parent() -> None:
    """A kill -9 of the parent leaves no judge, neither an idle one nor one inside an endless answer."""
    root = ROOT
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=root, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    judges = judges_of(parent.pid)
    assert judges
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for_the_end(judges, limit_s=120)


LIMITED = """
import mmap, resource, sys
if __name__ == "__mp_main__":  # in the judges, which import the main module again
    ballast = mmap.mmap(-1, {ballast_mb} * 2**20)

def main():
    from tasks.score.verifier import Verifier
    answers = [("1/2", ["0.5"]), ("$" + "x" * 20_000_000 + "$", ["5"])]
    try:
        with Verifier(workers=1, memory_mb={memory_mb}, timeout_s=60) as verifier:
            print(*(" ".join([verdict.name, verdict.reason]).strip() for verdict in verifier.grade(answers)), sep="; ")
            left = verifier._pool.schedule(resource.getrlimit, args=[resource.RLIMIT_AS]).result()
            print(left == resource.getrlimit(resource.RLIMIT_AS))
    except ValueError as error:
        print(error)

if __name__ == "__main__":
    main()
"""


def judge_under(limits: str, tmp_path: Path, ballast_mb: int = 1, memory_mb: int = 64) -> str:
    """What a process whose address space is limited by `ulimit` prints."""
    script = tmp_path / "limited.py"
    script.write_text(LIMITED.format(ballast_mb=ballast_mb, memory_mb=memory_mb))
    command = f'ulimit {limits} && exec "$0" "$1"'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, script], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize("limits", ["-v 4000000", "-S -v 2000000", "-v unlimited"])
def test_judges_work_under_limits_of_address_space(limits: str, tmp_path: Path) -> None:
    """Of batch systems, say: the right verdicts, the memory limit of one's own, and the limits that were afterwards."""
    assert judge_under(limits, tmp_path) == "correct; error needs more than 64 MB\nTrue\n"


def test_less_memory_than_asked_for_is_said_in_the_reason(tmp_path: Path) -> None:
    """Under a hard limit an answer may have what the judge leaves."""
    printed = judge_under("-v 1500000", tmp_path, memory_mb=8000)
    found = re.fullmatch(r"correct; error needs more than (\d+) MB\nTrue\n", printed)
    assert found
    assert 1000 < int(found[1]) < 1500_000 // 1024


def test_a_hard_limit_without_room_for_answers_is_named(tmp_path: Path) -> None:
    """Which limit, and how much is needed: not a pool that breaks under every answer."""
    printed = judge_under("-v 1500000", tmp_path, ballast_mb=1300, memory_mb=256)
    assert re.fullmatch(
        r"judges have too little memory: the hard limit of address space is 1464 MB \(`ulimit -Hv` shows it in kB\), "
        r"but an idle judge needs 1\d\d\d MB, and an answer 256 MB on top: raise it to 1\d\d\d MB or more\n",
        printed,
    )


def test_nonsense_is_refused(verifier: Verifier) -> None:
    """A string of solutions would count each of its characters; no solution makes every answer wrong."""
    for solutions in ["19", []]:
        with pytest.raises(ValueError, match="must be a list of 1 or more gold answers"):
            verifier.grade([("19", solutions)])


def test_math_500_golds_are_correct(data_folder: Path) -> None:
    """Real solutions, boxed as an answer, are correct against themselves, all 500 of them."""
    path = data_folder / "math_500" / "test.jsonl"
    golds = [json.loads(line)["answer"] for line in path.read_text().splitlines()]
    with Verifier(timeout_s=30) as verifier:
        verdicts = verifier.grade([(f"\\boxed{{{gold}}}", [gold]) for gold in golds])
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
            verifier.grade([("1", ["1"])])


def test_judges_leave_ctrl_c_to_their_parent() -> None:
    """From their first moment on: they import for seconds, and would print a traceback each."""
    before = judges_of(os.getpid())
    with Verifier(workers=2):
        judges = judges_of(os.getpid()) - before
        assert len(judges) == 2
        for judge in judges:
            blocked = Path(f"/proc/{judge}/status").read_text().partition("SigBlk:")[2].split()[0]
            assert int(blocked, 16) >> (signal.SIGINT - 1) & 1
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
