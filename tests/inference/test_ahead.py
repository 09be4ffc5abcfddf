"""Processes of servers begin before an engine needs them, and those that none needs end."""

import contextlib
from pathlib import Path

import psutil
import pytest

from configs import Config, load
from tasks.inference import launch
from tasks.inference.ahead import servers_begun, take_servers
from tests.support.sandbox_helpers import wait_gone


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Return a configuration with two servers, whose program imports nothing and prints its arguments."""
    program = tmp_path / "launch.py"
    program.write_text("import os, sys, time; print(os.fdopen(int(sys.argv[1])).read(), flush=True); time.sleep(600)")
    monkeypatch.setattr(launch, "__file__", str(program))
    (tmp_path / "config.json").write_text("{}")  # the folder is the model, too
    return load("smoke", [f"storage.cache={tmp_path}", "inference.replicas=2"])


def servers_now() -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if launch.__file__ in each.cmdline()]


def test_an_engine_takes_the_servers_that_have_begun(config: Config, tmp_path: Path) -> None:
    """The processes are those that serve: they get the arguments, and live until the engine ends them."""
    with servers_begun(config):
        begun = servers_now()
        assert len(begun) == 2
        servers = take_servers(config.servers)
        assert take_servers(config.servers) == []  # of a second engine
    for server in servers:
        server.start_serving(tmp_path)
    assert {server.pid for server in servers} == {process.pid for process in begun}
    for server in servers:
        while f'"--model", "{tmp_path}"' not in server.log.read_text():
            assert server.alive
        server.close()
    wait_gone(begun)


def test_servers_that_no_engine_takes_end(config: Config) -> None:
    """The run may continue with settings that it was begun with, or be complete, refused or interrupted."""
    for error in (KeyboardInterrupt, ValueError):
        begun = []
        with contextlib.suppress(error), servers_begun(config):
            begun.extend(servers_now())
            assert len(begun) == 2
            if error is ValueError:
                assert take_servers(config.inference) == []
                wait_gone(begun)
            raise error
        wait_gone(begun)


@pytest.mark.parametrize("more", ["inference.urls=[http://127.0.0.1:9]", "cluster.workers_per_node=2"])
def test_no_server_begins_that_another_process_would_start(config: Config, more: str) -> None:
    with servers_begun(load("smoke", [f"storage.cache={config.storage.cache}", more])):
        assert servers_now() == []


def test_a_server_that_has_died_begins_again(config: Config, tmp_path: Path) -> None:
    """Otherwise the engine would wait for it in vain."""
    with servers_begun(config):
        first, second = take_servers(config.servers)
        psutil.Process(first.pid).kill()
        while first.alive:
            pass
        first.start_serving(tmp_path)
        assert first.alive
        for server in (first, second):
            server.close()


def test_what_prevents_servers_is_left_to_the_engine(config: Config, tmp_path: Path) -> None:
    """It says more about it, in its turn: here, no log can be written."""
    (tmp_path / "logs").touch()
    with servers_begun(config):
        for server in take_servers(config.servers):
            with pytest.raises(OSError, match="logs"):
                server.start_serving(tmp_path)
            server.close()
