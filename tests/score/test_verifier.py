"""The verifier: right verdicts, and no answer can hang it, kill it or leave processes behind."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

import psutil
import pytest

from tasks.score.verifier import Verifier
from tests.support.paths import ROOT
from tests.support.sandbox_helpers import wait_gone
from tests.support.soak import scaled

ENDLESS = "$9^{9^{9^{9}}}$"
Library = partial(Verifier, function="tests.support.math_verify_alone:grade")
"""A verifier that gives whole texts to math-verify: no rule decides before it, so answers can be endless or huge."""


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Library(workers=2, timeout_s=30) as verifier:
        yield verifier


def workers_of(pid: int | None = None) -> set[psutil.Process]:
    """Return the workers of a process, by default of this one."""
    found = set()
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if "spawn_main" in " ".join(child.cmdline()):
                found.add(child)
    return found


def slow(terms: int) -> tuple[str, list[str]]:
    """Return a right answer and its solutions; 80 terms take about a second of processor time."""
    powers = [f"x^{{{power}}}" for power in range(terms)]
    return f"${'+'.join(powers)}$", [f"${'+'.join(reversed(powers))}$"]


@pytest.mark.slow
def test_a_timeout_hits_only_the_endless_answer() -> None:
    """Endless answers lose only their own verdicts, not those of answers sent with them."""
    answers = [rf"\boxed{{{number}}}" for number in range(12)]
    answers[3:3] = [ENDLESS]
    answers[9:9] = ["\\boxed{" + "{" * 5000 + "1" + "}" * 5000 + "}"]
    with Library(workers=1, timeout_s=1) as verifier:
        verdicts = verifier.grade([(answer, ["7"]) for answer in answers])
    expected = ["wrong"] * len(answers)
    expected[3], expected[8], expected[9] = "timeout", "correct", "unparsable"
    assert [verdict.name for verdict in verdicts] == expected
    assert verdicts[3].reason == "needs more than 1 s of processor time"


@pytest.mark.slow
def test_waiting_has_an_end() -> None:
    """An answer that no worker finishes becomes a timeout, and is graded again at the next request."""
    with Library(workers=1, timeout_s=600) as verifier:
        verifier._patience_s = 0.1
        verdict = verifier.grade([slow(300)])[0]
        assert (verdict.name, verdict.reason) == ("timeout", "no end within 0.1 s, 3 times")
        verifier._patience_s = 600
        verifier.grade([("1", ["1"])])
        assert verifier.grade([slow(80)])[0].name == "correct"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(scaled(600, 7200))
def test_workers_killed_at_random_moments_cost_nothing() -> None:
    """Every answer is graded, whatever the pool was doing when a worker was killed; no thread or worker is left."""
    random, others = Random(1), workers_of()
    with Library(workers=2) as verifier:
        threads = threading.active_count()
        for kill in range(scaled(sample=20, all_of_it=2000)):
            while not (workers := workers_of() - others):  # the pool is being replaced
                time.sleep(0.01)
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                workers.pop().kill()
            time.sleep(random.random() * 0.12)  # a dead worker is noticed within 0.1 s
            waiting = verifier._submit([(f"{kill}.{number}", [f"{kill}.{number}"]) for number in range(40)])
            assert {future.result(timeout=300).name for future in waiting} == {"correct"}
        assert threading.active_count() <= threads + 3  # those of a pool that is just being replaced
    assert not workers_of() - others


def test_each_distinct_pair_is_graded_once() -> None:
    """The cache works within a batch, across batches and between coroutines, and its size is limited."""
    with Library(workers=2, cache_size=2) as verifier:
        group = [(r"\boxed{4}", ["4"])] * 15 + [(r"\boxed{5}", ["4"])]
        verdicts = verifier.grade(group)
        assert verifier.sent == 2
        assert verifier.grade(group) == verdicts
        assert verifier.sent == 2
        verifier.grade(group[:1])  # makes the other pair the oldest in the cache
        verifier.grade([(r"\boxed{4}", ["4", "5"])])  # other solutions make another pair, one more than the cache holds
        assert verifier.sent == 3
        verifier.grade(group[:1])
        assert verifier.sent == 3
        verifier.grade(group)
        assert verifier.sent == 4


async def test_async_equals_sync(verifier: Verifier) -> None:
    """Hundreds of awaits get the batch's verdicts, grade each pair once, and keep the event loop responsive.

    One that is cancelled, as of an episode that hits its deadline, cancels no other for the same pair.
    """
    pairs = [(rf"\boxed{{{number % 40}}}", [str(number % 3)]) for number in range(400)]
    before = verifier.sent
    waiting = asyncio.gather(*(verifier.grade_async(*pair) for pair in pairs))
    cancelled = asyncio.create_task(verifier.grade_async(*pairs[0]))
    await asyncio.sleep(0)
    cancelled.cancel()
    ticks = 0
    while not waiting.done():
        await asyncio.sleep(0.001)
        ticks += 1
    assert verifier.sent - before <= len({(answer, solutions[0]) for answer, solutions in pairs})
    assert ticks > 1
    assert await waiting == verifier.grade(pairs)
    assert cancelled.cancelled()


@pytest.mark.slow
def test_close_ends_the_processes_and_the_waiting() -> None:
    """`close` ends all workers, even with endless answers, and every waiting caller gets an error."""
    before = workers_of()
    verifier = Library(workers=2, timeout_s=60)
    verifier.grade([("1", ["1"]), ("2", ["2"])])
    waiting = verifier._submit([(ENDLESS, ["1"]), (ENDLESS, ["2"])])
    workers = workers_of() - before
    assert workers
    start = time.monotonic()
    verifier.close()
    assert time.monotonic() - start < 50  # less than the time limit of an answer
    wait_gone(workers, 0)
    for future in waiting:
        with pytest.raises(RuntimeError, match="closed"):
            future.result()
    with pytest.raises(RuntimeError, match="closed"):
        verifier.grade([("3", ["3"])])


PARENT = f"""
from tests.score.test_verifier import Library
verifier = Library(workers=2, timeout_s=600)
verifier.grade([("1", ["1"]), ("2", ["2"])])
verifier._submit([({ENDLESS!r}, ["1"])])
print("ready", flush=True)
verifier.grade([({ENDLESS!r}, ["1"])])
"""


@pytest.mark.slow
def test_workers_end_with_a_killed_parent() -> None:
    """After kill -9 of the parent no worker remains, neither an idle one nor one in an endless answer."""
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        assert parent.stdout.readline() == "ready\n"
        workers = workers_of(parent.pid)
        assert workers
        parent.kill()
    wait_gone(workers, 120)


LIMITED = """
import resource

def main():
    from tests.score.test_verifier import Library
    answers = [("1/2", ["0.5"]), ("$" + "x" * 20_000_000 + "$", ["5"])]
    with Library(workers=1, memory_mb=64, timeout_s=60) as verifier:
        print(*(" ".join([verdict.name, verdict.reason]).strip() for verdict in verifier.grade(answers)), sep="; ")
        left = verifier._pool.schedule(resource.getrlimit, args=[resource.RLIMIT_AS]).result()
        print(left == resource.getrlimit(resource.RLIMIT_AS))

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_workers_work_under_limits_of_address_space(tmp_path: Path) -> None:
    """Under a batch system's limits verdicts are right, the old limits are restored, and the reason names the limit."""
    script = tmp_path / "limited.py"
    script.write_text(LIMITED)
    command = ["bash", "-c", 'ulimit -v 4000000 && exec "$0" "$1"', sys.executable, str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    hard = "than the hard limit of address space (`ulimit -Hv`)"
    assert done.stdout == f"correct; error needs more than 64 MB, or {hard}\nTrue\n"


@pytest.mark.slow
def test_math_500_golds_are_correct(data_folder: Path) -> None:
    """All 500 gold answers of MATH-500, boxed, are correct against themselves."""
    path = data_folder / "math_500" / "test.jsonl"
    golds = [json.loads(line)["answer"] for line in path.read_text().splitlines()]
    with Verifier(timeout_s=30) as verifier:
        verdicts = verifier.grade([(f"\\boxed{{{gold}}}", [gold]) for gold in golds])
    assert len(golds) == 500
    assert [gold for gold, verdict in zip(golds, verdicts, strict=True) if verdict.name != "correct"] == []


def test_workers_leave_ctrl_c_to_their_parent() -> None:
    """Workers block SIGINT from their start: they import for seconds and would each print a traceback."""
    before = workers_of()
    with Library(workers=2):
        workers = workers_of() - before
        assert len(workers) == 2
        for worker in workers:
            blocked = Path(f"/proc/{worker.pid}/status").read_text().partition("SigBlk:")[2].split()[0]
            assert int(blocked, 16) >> (signal.SIGINT - 1) & 1
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
