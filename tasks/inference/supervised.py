"""A command that ends with this process, however that ends, and a folder of its own that no other user may enter."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tasks.inference import supervisor

_LONGEST_FOLDER = 64
"""Paths of Unix sockets have 107 bytes at most; those of vLLM have 37 behind its folder."""


class Supervised:
    """A command under `supervisor`; it can be started again after it has ended.

    Attributes:
        log: file that receives its output.
        folder: its TMPDIR, of mode 0700. It stays until `close`, so that no other user can put a socket in its place.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        parent = tempfile.gettempdir()
        self._made = tempfile.TemporaryDirectory(
            prefix="math-mt-ppo-", dir=parent if len(os.fsencode(parent)) <= _LONGEST_FOLDER - 24 else "/tmp"
        )
        self.folder = Path(self._made.name)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        """Whether the supervisor lives, which ends with the command."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Of the supervisor, the parent of the command's process group."""
        return self._process.pid if self._process else None

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        cwd: Path | None = None,
    ) -> None:
        """Start it without waiting; it inherits the open files that `pass_fds` names."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # A session of its own: Ctrl-C in the terminal reaches the pipeline, which then ends the command.
        self._process = subprocess.Popen(
            [sys.executable, "-P", supervisor.__file__, str(self.log), str(self.folder), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**environment, "TMPDIR": str(self.folder)},
            start_new_session=True,
            pass_fds=pass_fds,
            cwd=cwd,
        )

    def stop(self) -> None:
        """End the process group; returns when it is gone."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()  # the supervisor ends the group on end of file
        try:
            self._process.wait(timeout=supervisor.GRACE_S + 10)
        finally:
            self._process = None
            self._kill_orphans()

    def close(self) -> None:
        """End the process group for good and remove the folder."""
        self.stop()
        self._made.cleanup()

    def log_tail(self, lines: int = 15) -> str:
        """The last lines that it wrote."""
        if not self.log.exists():
            return "(no log)"
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _kill_orphans(self) -> None:
        """A supervisor that was killed could not do it."""
        group = self.folder / supervisor.GROUP
        if group.exists():
            supervisor.signal_group(int(group.read_text()), signal.SIGKILL)
            supervisor.empty(self.folder)
