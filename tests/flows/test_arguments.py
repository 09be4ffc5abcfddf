"""Command lines take options, overrides and names in any order, and name what they do not know."""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from configs import flatten
from flows.launch.cli import share_cores
from storage.logs import catalog
from storage.objects.store import Store
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

BROKEN = "environment.type=tests.rollout.test_scripted:Maze environment.args.broken=reset"
UNREADABLE = 'problems.train={"kind":"jsonl","path":"/no","preset":"gsm8k"}'
Call = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Return a function that runs a command line in this process; it returns status, output and errors."""

    def run(line: str) -> tuple[int, str, str]:
        monkeypatch.setattr("storage.interrupts.run", lambda act, _="": sys.exit(act()))
        monkeypatch.setattr("sys.argv", line.split())
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(line.split()[0], run_name="__main__")
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capfd.readouterr()

    return run


def test_a_mistake_is_told_before_anything_begins(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers begin before the flow does, but not before the configuration is known to be right."""
    begun: list[object] = []
    monkeypatch.setattr("tasks.inference.ahead.servers_begun", begun.append)
    status, _, told = call("flows.math_mt_ppo smoke run.iteration=1")
    assert (status, begun) == (2, [])
    assert "did you mean" in told


ROOTS = {"storage.root": "/r/é😀"}
FLAGS = {"policy.fork": "demo@50", "policy.lora.rank": 16}


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        (
            "evaluate evaluation.samples=4 --print-config demo run.seed=7 --policy=X",
            {"run.name": "demo", "run.seed": 7, "evaluation.samples": 4},
        ),
        ("retrain --print-config run.seed=7", {"run.name": "nightly", "run.seed": 7}),
        ("math_mt_ppo smoke --print-config --root=/r/é😀", ROOTS),
        ("audit_trajectories --print-config storage.root='/r/é😀'", ROOTS),
        ("math_mt_ppo --fork demo@50 smoke policy.lora={} --print-config", FLAGS),
    ],
)
def test_a_flow_takes_words_and_flags_in_any_order(line: str, printed: dict[str, object], call: Call) -> None:
    """Flags stand for overrides, so deployments can say the same. The name of the default configuration may lack."""
    status, out, _ = call(f"flows.{line}")
    assert status == 0
    assert printed.items() <= dict(flatten(yaml.safe_load(out))).items()


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("line", "status", "says"),
    [
        ("flows.retrain retrain run.seed=7 smoke", 2, "override 'smoke' is not key=value"),
        ("flows.math_mt_ppo demo algorithm.eps_clp=0.3", 2, "did you mean 'eps_clip'"),
        ("flows.math_mt_ppo smoke --fork smoke@1", 2, "needs a name of its own: set run.name=…"),
        ("flows.rollout smoke --iteration -1", 2, "argument --iteration: '-1' is not a whole number of at least 0"),
        ("flows.math_mt_ppo smoke --check --plan", 2, "argument --plan: not allowed with argument --check"),
        ("flows.audit_trajectories scor.type=x storage.root=ROOT", 2, "did you mean 'score'"),
        ("storage diff one --root ROOT", 2, "arguments are required: VERSION"),
        ("storage ls --bogus", 2, "unrecognized arguments: --bogus"),
        ("storage verify one --deep two --root ROOT", 1, "ROOT/one was never committed"),
        ("storage alias rollback --root ROOT --reason why champion", 1, "'champion' has 0 moves"),
        ("tasks.audit read one --port 0 two --root ROOT", 1, "'one' is neither a run"),
        (
            "flows.retrain smoke --retry 1 storage.root=ROOT",
            1,
            "error: retraining 'smoke' has no night 1; nights so far: 0",
        ),
        ("flows.retrain smoke --explain storage.root=ROOT", 0, "retraining 'smoke' has had no night yet in ROOT"),
        ("flows.retrain --explain storage.root=ROOT/vra", 1, "error: nothing is stored in ROOT/vra: check the root"),
        ("flows.math_mt_ppo smoke --check storage.root=ROOT", 0, "verdict while playing: correct, reward 1"),
        (f"flows.math_mt_ppo smoke --check storage.root=ROOT {BROKEN}", 2, " in reset)"),
    ],
)
def test_what_is_wrong_is_named(line: str, status: int, says: str, call: Call, tmp_path: Path) -> None:
    """Options of all commands (`--root`) may also follow the command. A mistyped root is no store without problems."""
    catalog.enter(Store(str(tmp_path)), "runs/r/run", "run", [], "")
    found, out, err = call(line.replace("ROOT", str(tmp_path)))
    assert found == status
    assert says.replace("ROOT", str(tmp_path)) in out + err
    assert "Traceback" not in err
    assert err.count("error: ") <= 1
    assert not (tmp_path / "vra").exists()


@pytest.mark.usefixtures("environment")
def test_a_flow_that_cannot_read_its_problems_says_so_without_a_traceback(tmp_path: Path) -> None:
    """With a traceback the error would come after a hundred lines of Prefect's output."""
    line = f"-m flows.math_mt_ppo smoke storage.root={tmp_path}/var storage.cache={tmp_path}/cache {UNREADABLE}"
    done = subprocess.run([sys.executable, *line.split()], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]  # Prefect may log after it
    assert [error.partition(" cannot")[0] for error in errors] == ["error: /no"]


THREADS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def test_threads_sleep_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise threads that wait keep their core busy. Deployed runs have the same settings."""
    for name in THREADS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    share_cores()
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    assert 0 < int(os.environ["GOMP_SPINCOUNT"]) <= 1000
    deployed = yaml.safe_load((ROOT / "prefect.yaml").read_text())["definitions"]["work_pool"]["job_variables"]["env"]
    assert {name: deployed[name] for name in THREADS} == {name: os.environ[name] for name in THREADS}
