"""Processes of servers begin before an engine needs them, and those that none needs end."""

from pathlib import Path

import psutil
import pytest

from configs.inference import Inference
from tasks.inference import launch
from tasks.inference.ahead import servers_begun, take_servers
from tests.support.sandbox_helpers import wait_gone

SETTINGS = Inference(replicas=2)


@pytest.fixture(autouse=True)
def _waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the program of a server import nothing, and print its arguments."""
    program = tmp_path / "launch.py"
    program.write_text("import os, sys, time; print(os.fdopen(int(sys.argv[1])).read(), flush=True); time.sleep(600)")
    monkeypatch.setattr(launch, "__file__", str(program))


def servers_now() -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if launch.__file__ in each.cmdline()]


def test_an_engine_takes_the_servers_that_have_begun(tmp_path: Path) -> None:
    """The processes are those that serve: they get the arguments, and live until the engine ends them."""
    with servers_begun(SETTINGS, tmp_path):
        begun = servers_now()
        assert len(begun) == 2
        servers = take_servers(SETTINGS)
        assert take_servers(SETTINGS) == []  # of a second engine
    for server in servers:
        server.start_serving(tmp_path / "model")
    assert {server.pid for server in servers} == {process.pid for process in begun}
    for server in servers:
        while f'"--model", "{tmp_path}/model"' not in server.log.read_text():
            assert server.alive
        server.close()
    wait_gone(begun)


def test_servers_with_other_settings_end(tmp_path: Path) -> None:
    """A run may continue with settings that it was begun with."""
    with servers_begun(SETTINGS, tmp_path):
        begun = servers_now()
        assert take_servers(Inference(replicas=2, threads=2)) == []
        wait_gone(begun)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_servers_that_no_engine_needs_end(tmp_path: Path, error: type[BaseException]) -> None:
    """The run may be complete, refused or interrupted."""
    begun = []

    def flow() -> None:
        with servers_begun(SETTINGS, tmp_path):
            begun.extend(servers_now())
            raise error

    with pytest.raises(error):
        flow()
    assert len(begun) == 2
    wait_gone(begun)


def test_a_server_that_has_died_begins_again(tmp_path: Path) -> None:
    """Otherwise the engine would wait for it in vain."""
    with servers_begun(SETTINGS, tmp_path):
        first, second = take_servers(SETTINGS)
        psutil.Process(first.pid).kill()
        while first.alive:
            pass
        first.start_serving(tmp_path)
        assert first.alive
        for server in (first, second):
            server.close()


def test_what_prevents_servers_is_left_to_the_engine(tmp_path: Path) -> None:
    """It says more about it, in its turn: here, no log can be written."""
    (tmp_path / "logs").touch()
    with servers_begun(SETTINGS, tmp_path / "logs"):
        assert take_servers(SETTINGS) == []
    assert servers_now() == []
