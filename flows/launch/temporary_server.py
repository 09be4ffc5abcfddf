"""A Prefect server for one command, which ends with it however it ends, and is started anew if it dies.

Where no API is configured Prefect starts a temporary server itself, but asks for no password, and leaves it behind when
the process is killed. This one runs under the supervisor that vLLM runs under.
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
from tasks.inference.supervised import Supervised

logger = logging.getLogger(__name__)

_LOOK_S = 0.2
_STOPPED_LOOKS = 10
"""A stopped server (SIGSTOP) does not answer: Prefect's client would wait twenty minutes, and then fail."""
_STARTS = 5
"""Most attempts to start a server, where each is killed or stopped before it answers."""
_LIGHT = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT_SERVER_LOGGING_LEVEL": "ERROR"}
"""As Prefect starts its own temporary server: neither pages nor scheduler."""


_STARTED: list["_Server"] = []
"""Kept until this process ends: when Python exits, Prefect still sends what it has to say."""


@contextmanager
def temporary_server() -> Iterator[None]:
    """Inside of the block Prefect works with a server of this process's own, unless an API is configured.

    Raises:
        RuntimeError: it does not start; holds the end of its log. Or this machine does not reach itself.
        ValueError: Prefect cannot work with a proxy of the environment.
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
    """The socket is this process's own, so requests wait in it while a server that died is started anew."""

    def __init__(self, log: Path) -> None:
        self.password = new_password()
        self._listener = listen()
        self._port: int = self._listener.getsockname()[1]
        self.api = f"http://{HOST}:{self._port}/api"
        self._supervised = Supervised(log)

    def start(self) -> None:
        """Start the server and wait until it answers. If it is killed or stopped before, try again: `_STARTS` times.

        Raises:
            RuntimeError: it does not; holds the end of its log.
        """
        for again in range(_STARTS):
            if again:
                logger.warning("the temporary Prefect server was killed or stopped while it started: starting it anew")
                self._supervised.stop()
            self._spawn()
            if self._answers():
                return
            if not (self._supervised.alive or self._supervised.was_killed):
                raise self._failure("did not start")
        raise self._failure(f"was killed or stopped {_STARTS} times while it started")

    def _failure(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"the temporary Prefect server {what}; {self._supervised.log} ends:\n{self._supervised.log_tail()}"
        )

    def _spawn(self) -> None:
        from prefect.settings import get_current_settings

        descriptor = self._listener.fileno()
        settings = get_current_settings().to_environment_variables(exclude_unset=True)
        environment = {**os.environ, **settings, **_LIGHT, **protection(self._port, self.password)}
        command = [sys.executable, "-P", prefect_server.__file__, str(descriptor)]
        self._supervised.start(command, environment, pass_fds=[descriptor])

    def _answers(self) -> bool:
        """Wait for the first answer; return False if the server ends or is stopped before it.

        Raises:
            RuntimeError: it takes too long.
        """
        deadline = time.monotonic() + START_SECONDS
        for _ in self._looks():
            if healthy(self._port):
                return True
            if time.monotonic() > deadline:
                raise self._failure(f"has not answered in {START_SECONDS} s")
        return False

    def _looks(self) -> Iterator[None]:
        """Yield until the server died or was seen stopped `_STOPPED_LOOKS` times in a row. Being slow does not count.

        Looks are counted instead of seconds, because stopping the whole job stops this process as well.
        """
        stopped = 0
        while self._supervised.alive and stopped < _STOPPED_LOOKS:
            yield
            stopped = stopped + 1 if self._supervised.is_stopped else 0
            time.sleep(_LOOK_S)

    def keep(self) -> None:
        """Start the server again whenever it has died or was stopped.

        If that fails, the command ends: it could only wait for answers.
        """
        try:
            while True:
                for _ in self._looks():
                    pass
                logger.warning("the temporary Prefect server has died, or was stopped: starting it anew")
                self._supervised.stop()
                self.start()
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody else would hear of it
            self._listener.close()  # nobody shall wait for it
            interrupts.fail(f"the temporary Prefect server has died, and cannot be started anew: {error}")
            self._supervised.close()
