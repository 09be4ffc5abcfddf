"""Every command that writes can be killed at any moment: nothing is lost, nothing stays, and the same command ends."""

import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from storage import layout
from storage.logs import leases
from storage.maintenance.verify import verify
from storage.objects.store import Store
from storage.versions import datasets, manifests
from tasks.tracking.points import Point, TrackedRun
from tests.support.killed_flow import MARK, mark_of
from tests.support.paths import ROOT
from tests.support.scripted_judge import scripted_judge
from tests.support.soak import scaled

pytestmark = pytest.mark.long

KILLS = scaled(1, 8)
"""Kills of each command."""
SAMPLE = ["fit", "annotations", "audit", "import", "gc"]
GONE_S = 10.0
"""Most seconds until no process of a killed command is left."""
LONGEST_S = {"flows": 10.0, "tasks": 5.0, "storage": 2.5}
"""The latest random moment of a kill, after which the command has mostly ended on an idle machine."""

JUDGE = ["score.type=judge", "models.judge.name=script", "models.judge.urls=[JUDGE]"]
FIRST = "policy={path: ROOT/runs/smoke/checkpoints/000000}"
COMMANDS = {
    "math_mt_ppo": ["flows.math_mt_ppo", "smoke", "KNOBS", "run.iterations=3"],
    "fit": ["flows.fit", "smoke", "KNOBS", "run.name=fitted", "fit.epochs=2", FIRST, "--data", "smoke"],
    "evaluate": ["flows.evaluate", "smoke", "KNOBS", "--policy", "runs/smoke/checkpoints/000000"],
    "score": ["flows.score", "smoke", "KNOBS", "score.reading=library"],
    "annotations": ["flows.score", "smoke", "KNOBS", *JUDGE],
    "audit": ["flows.audit_trajectories", "smoke", "KNOBS", "--fail-on", "never"],
    "history": ["flows.history", "smoke", "KNOBS"],
    "track": ["flows.track", "smoke", "--to", f"{__name__}:Appending", "--root", "ROOT", "--cache", "FOLDER/cache"],
    "import": ["tasks.audit", "import", "--format", "messages", "--name", "other", "FOLDER/rows.jsonl", "KNOBS"],
    "exclude": ["tasks.provenance", "--root", "ROOT", "exclude", "--ids", "FOLDER/ids", "--reason", "wrong"],
    "cp": ["storage", "--root", "ROOT", "cp", "smoke", "FOLDER/copy"],
    "export": ["storage", "--root", "ROOT", "export", "smoke/latest", "FOLDER/exported"],
    "gc": ["storage", "--root", "ROOT", "gc", "--delete", "--older-than-hours", "0"],
    "repair": ["storage", "--root", "ROOT", "repair"],
    "alias": ["storage", "--root", "ROOT", "alias", "set", "smoke/mine", "smoke/latest"],
}
CHAT = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]


class Appending:
    """A tracker of one's own."""

    def __init__(self, run: TrackedRun) -> None:
        self._file = run.folder / "points"

    def log(self, point: Point) -> None:
        with self._file.open("a") as file:
            file.write(f"{point.index}\n")

    def close(self) -> None:
        pass


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Yield a TMPDIR, whose path is short, because socket paths must be."""
    with tempfile.TemporaryDirectory(prefix="k-") as folder:
        yield Path(folder)


def nonces(store: Store) -> dict[str, str]:
    paths = [item.path for item in store.walk("") if item.path.endswith("/manifest.json")]
    versions = [path.removesuffix("/manifest.json") for path in paths]
    return {version: manifests.read(store, version).nonce for version in versions}


def within(seconds: float, what: Callable[[], object]) -> None:
    """Wait until a function returns nothing."""
    deadline = time.monotonic() + seconds
    while left := what():
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def filled(command: list[str], knobs: list[str], folder: Path, judge: str) -> list[str]:
    """Return a command line with the test's own values."""
    places = {"FOLDER": str(folder), "ROOT": f"{folder}/var", "JUDGE": judge}
    words = [word for each in command for word in (knobs if each == "KNOBS" else [each])]
    for name, value in places.items():
        words = [word.replace(name, value) for word in words]
    return [sys.executable, "-m", *words]


@pytest.mark.timeout(scaled(1200, 36_000))
@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("name", scaled(SAMPLE, list(COMMANDS)))
def test_a_killed_command_is_run_again(name: str, trained: list[str], tmp_path: Path, scratch: Path) -> None:
    """Earlier versions stay; the same command then succeeds, and leaves neither process nor folder."""
    seed = int(os.environ.get("SEED", secrets.randbelow(10**6)))
    dice, store, mark = random.Random(seed), Store(f"{tmp_path}/var"), uuid.uuid4().hex
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps({'messages': CHAT})}\n" * 50)
    (row, *_) = datasets.rows(store, layout.trajectories("smoke", 0), tmp_path / "cache")
    (tmp_path / "ids").write_text(row["trajectory_id"])
    shutil.copytree(tmp_path / "var", tmp_path / "before")
    environment = {**os.environ, MARK: mark, "TMPDIR": str(scratch), "JUDGE_API_KEY": "x"}
    with scripted_judge(lambda _: (200, "Score: 7")) as judge:
        command = filled(COMMANDS[name], trained, tmp_path, judge.url)
        longest, kills = LONGEST_S[command[2].partition(".")[0]], 0
        while kills < KILLS:
            before, moment = nonces(store), dice.uniform(0.1, longest)
            status = killed(command, environment, moment, tmp_path / "log")
            assert status in (0, -signal.SIGKILL), (tmp_path / "log").read_text()[-3000:]
            print(f"{name}: killed after {moment:.2f} s (SEED={seed}), status {status}")
            within(GONE_S, lambda: marked(mark))
            assert before.items() <= nonces(store).items()
            kills += status != 0
            if status == 0:  # it was faster: the next one begins anew, and is killed earlier
                longest = 0.9 * longest
                for folder in ("var", "copy", "exported"):
                    shutil.rmtree(tmp_path / folder, ignore_errors=True)
                shutil.copytree(tmp_path / "before", tmp_path / "var")
        shutil.rmtree(tmp_path / "exported", ignore_errors=True)  # it is whole, and would be refused
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert verify(store, sorted(nonces(store)), deep=True).findings == []
    assert leases.is_held(store, "smoke") is None
    within(GONE_S, lambda: marked(mark))
    within(GONE_S, lambda: list(scratch.iterdir()))
    assert [path for path in (tmp_path / "cache/scratch").rglob("*") if path.is_file()] == []


def killed(command: list[str], environment: dict[str, str], after_s: float, log: Path) -> int:
    """Run a command, and kill it if it still runs after some seconds; return its status."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
        try:
            return process.wait(after_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def marked(mark: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if mark_of(process) == mark]
