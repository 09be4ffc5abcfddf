"""Fixtures that all tests share: a tiny policy, one real vLLM server for the whole session, and stores."""

import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from storage.processes.child import mark
from tests.support.prefect_home import prefect_home

# Whatever tests start, servers of `make up` included, ends with this process, also if Ctrl-C or a kill ends it.
os.environ.update(mark())
# These must be set before anything imports Prefect. The tests have their own home, and no telemetry is sent.
os.environ["PREFECT_HOME"] = str(prefect_home().path)
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
os.environ["PREFECT_SERVER_ALLOW_EPHEMERAL_MODE"] = "false"  # a killed test would leave an ephemeral server behind
os.environ["OMP_WAIT_POLICY"] = "passive"
os.environ["PREFECT_LOGGING_LEVEL"] = "WARNING"  # Prefect's handler outlives the stream that pytest captures
os.environ["PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW"] = "ignore"  # most tests call functions outside of a flow
os.environ["RAY_AUTH_MODE"] = "token"  # Ray reads it when it is first imported, whichever test does that
os.environ["DO_NOT_TRACK"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("PREFECT_API_URL", None)
# Otherwise each of the hundreds of processes that tests start compiles the whole project again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from configs.inference import Inference
from configs.rollout import Rollout
from storage import layout
from storage.objects.store import Store
from storage.versions import checkpoints
from storage.versions.checkpoints import Checkpoint
from storage.versions.drafts import Provenance
from tasks.agents.chat import Chat, load_tokenizer
from tasks.inference.engine import Engine
from tasks.inference.location import POLICIES
from tasks.score.verifier import Verifier
from tasks.tools.sandbox import Sandboxes
from tests.support import real_data
from tests.support import s3_server as s3
from tests.support.sandbox_helpers import wait_gone
from tests.support.side_by_side import FilesByServer, put_long_files_first

# Shells start background jobs with SIGINT ignored, and the processes that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# On shared cores single examples are slow, and so is drawing them.
settings.register_profile("ci", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")

INFERENCE = Inference(max_model_len=128, enforce_eager=True, extra_args=["--kv-cache-memory-bytes", str(2**26)])
"""Settings of vLLM servers; a cache of 64 MiB instead of 1 GiB makes their start 2 seconds shorter."""


_SERVERS = {"engine", "prefect_api", "s3_server", "bucket", "any_store[s3]", "browser", "server"}
"""Fixtures that start a server or are one."""
_SHARED_S3 = "TESTS_SHARED_S3"
"""Environment variable with the endpoint of the S3 server that all processes of pytest-xdist share."""
_shared_s3: ExitStack = ExitStack()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that start a server as `slow`, so that `make test-fast` leaves them out."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        callspec = getattr(item, "callspec", None)
        if callspec and callspec.params.get("any_store") == "s3":
            fixtures.add("any_store[s3]")
        if fixtures & _SERVERS:
            item.add_marker("slow")
    put_long_files_first(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return FilesByServer(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Start one S3 server for all processes, because each server needs processor time even while it is idle."""
    if not (os.environ.get("S3_TEST_ENDPOINT") or s3.available()):
        folder = _shared_s3.enter_context(tempfile.TemporaryDirectory(prefix="s3-"))
        os.environ[_SHARED_S3] = _shared_s3.enter_context(s3.Rgw(Path(folder) / "server")).endpoint


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line for each reason for which tests were skipped, with their number."""
    skipped = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()))
    for reason, count in skipped.most_common():
        terminalreporter.write_line(f"SKIPPED [{count}] {reason.removeprefix('Skipped: ')}")


def pytest_unconfigure() -> None:
    _shared_s3.close()


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a transformers folder with a tiny Qwen3 after a few training steps, and its tokenizer."""
    return Path(shutil.copytree(POLICIES / "smoke", tmp_path_factory.mktemp("policies") / "smoke"))


@pytest.fixture(scope="session")
def chat(policy_folder: Path) -> Chat:
    """Return the chat of the tiny policy."""
    return Chat(load_tokenizer(policy_folder))


@pytest.fixture(scope="session")
def qwen3() -> Chat:
    """Return a chat in the format of Qwen 3."""
    from tests.support.chat_formats import chat_of

    return chat_of("qwen3")


@pytest.fixture(scope="session")
def checkpoint_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(str(tmp_path_factory.mktemp("checkpoints")))


def commit_policy(store: Store, version: int, folder: Path, noise: float = 0.0, **saving: Any) -> Checkpoint:
    """Commit the policy in `folder`, with noise of standard deviation `noise` on its weights; return it opened.

    `saving` are arguments of `save_pretrained`.
    """
    import torch
    from transformers import AutoTokenizer

    from configs.train import Train
    from tasks.train.policy import load_policy, make_canary

    model = load_policy(folder, Train())
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch, **saving)
        AutoTokenizer.from_pretrained(folder).save_pretrained(scratch)
        key = layout.checkpoint("shared", version)
        canary = make_canary(model)
        checkpoints.commit(store, key, Path(scratch), None, canary, Provenance(config={}), [], {})
    return checkpoints.open_checkpoint(store, key, Path(scratch))


@pytest.fixture(scope="session")
def policies(checkpoint_store: Store, policy_folder: Path) -> list[Checkpoint]:
    """Return three policy versions with different weights."""
    return [commit_policy(checkpoint_store, version, policy_folder, 0.02 * version) for version in range(3)]


@pytest.fixture(scope="session")
def engine(policies: list[Checkpoint], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Yield the session's vLLM server. A test that needs a policy calls `serve` first. At the end nothing is left."""
    with Engine(INFERENCE, Rollout(), tmp_path_factory.mktemp("logs")) as engine:
        engine.serve(policies[0])
        yield engine
        (server,) = engine.servers
        folder = Path(server.url.removeprefix("unix://")).parent
        family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    wait_gone(family)
    assert not folder.exists()


def forget(engine: Engine) -> None:
    """Make the next `serve` swap and prove the weights again: another engine has swapped them."""
    engine._policy = None
    for replica in engine._replicas:
        replica.proven = None


@pytest.fixture(scope="session")
def data_folder() -> Path:
    return real_data.folder()


@pytest.fixture(scope="session")
def verifier() -> Iterator[Verifier]:
    with Verifier(workers=2) as verifier:
        yield verifier


@pytest.fixture(scope="session")
def prefect_database(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an empty database for Prefect's server, made once for each version: its migrations take seconds."""
    database = pytestconfig.cache.mkdir(f"prefect-{metadata.version('prefect')}") / "prefect.db"
    with FileLock(database.with_suffix(".lock")):
        if not database.exists():
            made = tmp_path_factory.mktemp("prefect")
            command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"]
            subprocess.run(command, env={**os.environ, "PREFECT_HOME": str(made)}, check=True, capture_output=True)
            shutil.copy(made / database.name, database.with_suffix(".new"))
            database.with_suffix(".new").rename(database)
    return database


@pytest.fixture(scope="session")
def prefect_api(prefect_database: Path) -> Iterator[str]:
    """Yield the URL of the session's Prefect server.

    Flows in other processes need the URL as PREFECT_API_URL and the password as PREFECT_API_AUTH_STRING.
    """
    from prefect.settings import PREFECT_API_URL

    from flows.launch.temporary_server import temporary_server

    shutil.copy(prefect_database, os.environ["PREFECT_HOME"])
    with temporary_server():
        yield PREFECT_API_URL.value()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


MadeOnce = Callable[[str, Path, Callable[[], object]], None]


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """Return a function that fills a folder for each test of a module: the first time by a call, then with a copy.

    Its arguments are a name for the content, the folder, and the call.
    """
    kept = tmp_path_factory.mktemp("made-once")

    def fill(name: str, folder: Path, make: Callable[[], object]) -> None:
        if (kept / name).exists():
            shutil.copytree(kept / name, folder)
        else:
            make()
            shutil.copytree(folder, kept / name)

    return fill


@pytest.fixture(params=["local", "s3"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Return an empty store: on the local disk, and on S3."""
    if request.param == "s3":
        return Store(f"s3://{request.getfixturevalue('bucket')}/root")
    return Store(str(tmp_path / "root"))


@pytest.fixture(scope="session")
def sandboxes() -> Sandboxes:
    sandboxes = Sandboxes()
    try:
        sandboxes.check()
    except ValueError as error:
        _leave_out(str(error), fails=not shutil.which("bwrap"))
    return sandboxes


def _leave_out(reason: str, *, fails: bool = True) -> NoReturn:
    """Skip the test; in CI, which has what tests need, let it fail."""
    (pytest.fail if fails and os.environ.get("CI") == "true" else pytest.skip)(reason)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of the S3 server that all tests share: what S3_TEST_ENDPOINT says, otherwise one of our own."""
    if endpoint := os.environ.get("S3_TEST_ENDPOINT") or os.environ.get(_SHARED_S3):
        yield endpoint
    else:
        if reason := s3.available():
            _leave_out(reason)
        with s3.Rgw(tmp_path_factory.mktemp("s3") / "server") as server:
            yield server.endpoint


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a new bucket, and set the ordinary AWS variables for its server. It is not deleted."""
    return s3.make_bucket(s3_server, monkeypatch)


@pytest.fixture
def overrides(
    engine: Engine, prefect_api: str, verifier: Verifier, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> list[str]:
    """Return overrides for a new store and for the session's vLLM server, named by its URL as in production.

    Flows of the test's process also share the session's verifier; those in other processes start their own.
    """
    monkeypatch.setattr("flows.run.resources.Verifier", lambda *_, **__: nullcontext(verifier))
    server = engine.servers[0]
    monkeypatch.setenv("VLLM_API_KEY", secrets.token_hex(8))  # production has a key; the test server asks for none
    forget(engine)  # the flow will swap the server's weights
    return [
        f"storage.root={tmp_path}/var",
        f"storage.cache={tmp_path}/cache",
        f"inference.urls=[{server.url}]",
        "score.workers=1",  # each worker is a process that imports sympy
    ]


@pytest.fixture
def trained(overrides: list[str], tmp_path: Path, made_once: MadeOnce) -> list[str]:
    """Return the overrides of a run after its first iteration, which has made policy versions 0 and 1."""
    from flows.math_mt_ppo import math_mt_ppo

    made_once("first iteration", tmp_path / "var", lambda: math_mt_ppo("smoke", [*overrides, "run.iterations=1"]))
    return overrides


@pytest.fixture
def plain(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> list[str]:
    """Let a test call tasks as functions: they log to `test` and share a verifier. Return overrides for a new store."""
    for module in ("run.workspace", "stages.warm_start", "stages.problems", "stages.rollout"):
        monkeypatch.setattr(f"flows.{module}.get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr("flows.run.resources.Verifier", lambda *_, **__: nullcontext(verifier))
    caplog.set_level(logging.INFO, "test")
    return [f"storage.root={tmp_path}/var", f"storage.cache={tmp_path}/cache"]


@pytest.fixture
def environment(prefect_api: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Set Prefect's address and password for flows in other processes; return no further variables.

    The fork server reads the address when it starts.
    """
    from prefect.settings import PREFECT_API_AUTH_STRING

    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", PREFECT_API_AUTH_STRING.value())
    return {}
