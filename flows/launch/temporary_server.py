"""A Prefect server for one command. It ends with the command, however that ends, and is restarted if it dies.

Without a configured API, Prefect itself starts a temporary server. That one needs no password, and stays behind if the
process is killed. The server here runs under the same supervisor as vLLM.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flows.launch import prefect_server
from flows.launch.prefect_server import (
    HOST,
    START_SECONDS,
    check_proxies,
    healthy,
    ignore_proxies_on_loopback,
    listen,
    new_password,
    protection,
)
from storage import interrupts
from storage.processes.child import Child

logger = logging.getLogger(__name__)

_CHECK_S = 0.2
_STOPPED_CHECKS = 10
"""Checks in a row that find the server stopped (SIGSTOP) before it is restarted.

It does not answer then: Prefect's client would wait for twenty minutes and fail.
"""
_STARTS = 5
"""Most attempts to start a server, if each is killed or stopped before it answers."""
_LIGHT = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT_SERVER_LOGGING_LEVEL": "ERROR"}
"""The settings of Prefect's own temporary server: neither pages nor scheduler."""


_STARTED: list["_Server"] = []
"""All servers, kept until this process ends: Prefect still sends logs and states when Python exits."""


@contextmanager
def temporary_server() -> Iterator[None]:
    """Give Prefect a server of this process in the block, unless an API is configured.

    Raises:
        RuntimeError: the server does not start (the message contains the end of its log), or this machine does not
            reach itself.
        ValueError: Prefect cannot use a proxy of the environment.
    """
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, PREFECT_HOME, temporary_settings

    ignore_proxies_on_loopback()
    check_proxies()
    if PREFECT_API_URL.value():
        yield
        return
    server = _Server(PREFECT_HOME.value() / "temporary-server.log")
    _STARTED.append(server)
    server.start()
    threading.Thread(target=server.keep, name="prefect-server", daemon=True).start()
    with temporary_settings({PREFECT_API_URL: server.api, PREFECT_API_AUTH_STRING: server.password}):
        yield


class _Server:
    """A supervised server. This process holds its socket, so requests wait there during a restart."""

    def __init__(self, log: Path) -> None:
        self.password = new_password()
        self._listener = listen()
        self._port: int = self._listener.getsockname()[1]
        self.api = f"http://{HOST}:{self._port}/api"
        self._child = Child(log)

    def start(self) -> None:
        """Start the server and wait until it answers. If it is killed or stopped before, retry: `_STARTS` attempts.

        Raises:
            RuntimeError: it does not answer; the message contains the end of its log.
        """
        for attempt in range(_STARTS):
            if attempt:
                logger.warning("the temporary Prefect server was killed or stopped while it started: restarting it")
                self._child.stop()
            self._spawn()
            if self._answers():
                return
            if not (self._child.alive or self._child.was_killed):
                raise self._failure("did not start")
        raise self._failure(f"was killed or stopped {_STARTS} times while it started")

    def _failure(self, what: str) -> RuntimeError:
        return RuntimeError(f"the temporary Prefect server {what}; {self._child.log} ends:\n{self._child.log_tail()}")

    def _spawn(self) -> None:
        from prefect.settings import get_current_settings

        descriptor = self._listener.fileno()
        settings = get_current_settings().to_environment_variables(exclude_unset=True)
        environment = {**os.environ, **settings, **_LIGHT, **protection(self._port, self.password)}
        command = [sys.executable, "-P", prefect_server.__file__, str(descriptor)]
        self._child.start(command, environment, pass_fds=[descriptor])

    def _answers(self) -> bool:
        """Wait for the first answer; return False if the server ends or is stopped before it.

        Raises:
            RuntimeError: the server takes too long.
        """
        deadline = time.monotonic() + START_SECONDS
        for _ in self._checks():
            if healthy(self._port):
                return True
            if time.monotonic() > deadline:
                raise self._failure(f"has not answered in {START_SECONDS} s")
        return False

    def _checks(self) -> Iterator[None]:
        """Yield until the server has died, or was found stopped `_STOPPED_CHECKS` times in a row; slow is not stopped.

        It counts checks instead of seconds, because a stop of the whole job stops this process too.
        """
        stopped = 0
        while self._child.alive and stopped < _STOPPED_CHECKS:
            yield
            stopped = stopped + 1 if self._child.is_stopped else 0
            time.sleep(_CHECK_S)

    def keep(self) -> None:
        """Restart the server whenever it has died or was stopped.

        If a restart fails, the command ends: it could only wait for answers for ever.
        """
        try:
            while True:
                for _ in self._checks():
                    pass
                logger.warning("the temporary Prefect server has died, or was stopped: restarting it")
                self._child.stop()
                self.start()
        except Exception as error:  # noqa: BLE001 - no other code in this thread reports it
            self._listener.close()  # no request may wait for it
            interrupts.fail(f"the temporary Prefect server has died and cannot be restarted: {error}")
            self._child.close()
