"""The lines of a command on the terminal: the story of the run, without those of Prefect (`--verbose` shows them).

Progress is a bar if standard error is a terminal. Elsewhere it is a line now and then, so that a file stays short.
"""

import logging
import os
import time
from typing import TYPE_CHECKING

import prefect
from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from storage.visible import Fleeting, printable

if TYPE_CHECKING:
    from rich.progress import TaskID

_EVERY_S = 30.0
"""Seconds between two lines of progress where there is no terminal."""
_PREFECT = os.path.dirname(prefect.__file__) + os.sep
_STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "red"}


class _Terminal(Terminal):
    """A terminal whose cursor is never hidden: a command that is killed could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        return show


class Console(logging.Handler):
    """A handler for all log records of a command, in place of Prefect's."""

    def __init__(self) -> None:
        super().__init__()
        self._terminal = _Terminal(stderr=True, highlight=False, soft_wrap=True)
        self._printed = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if done := getattr(record, "iterations", None):
                self._move(*done)
            if isinstance(record.msg, Fleeting):
                self._progress(record.getMessage())
            # Errors that Prefect's engine logs are told at the end, once.
            elif record.name not in ("prefect.flow_runs", "prefect.task_runs") or _PREFECT not in record.pathname:
                self._print(record)
        except Exception:  # noqa: BLE001 - as every handler: an error of logging ends no run
            self.handleError(record)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()
        super().close()

    def _print(self, record: logging.LogRecord) -> None:
        kind = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        line = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {kind}{record.getMessage()}"
        if record.exc_info:
            line += "\n" + logging.Formatter().formatException(record.exc_info)
        self._terminal.print(printable(line), markup=False, style=_STYLES.get(record.levelno, ""))
        if self._bar and self._bar.finished:  # tables may follow
            self._bar.stop()
        self._printed = time.monotonic()

    def _progress(self, text: str) -> None:
        if self._bar and self._task is not None:
            self._bar.update(self._task, doing=printable(text))
            self._bar.start()  # again, if it was stopped after the last iteration: for the evaluation at the end
        elif not self._terminal.is_terminal and time.monotonic() - self._printed > _EVERY_S:
            self._terminal.print(printable(text), markup=False)
            self._printed = time.monotonic()

    def _move(self, done: int, total: int) -> None:
        """Move the bar of iterations, which appears with the first one."""
        if not self._terminal.is_terminal:
            return
        if self._bar is None:
            doing = TextColumn("{task.fields[doing]}", markup=False)
            columns = TextColumn("iterations"), BarColumn(), MofNCompleteColumn(), doing
            self._bar = Progress(*columns, console=self._terminal, transient=True, redirect_stdout=False)
            self._task = self._bar.add_task("", total=total, doing="")
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=done, total=total)


def tell() -> Console:
    """Print records with a `Console` from now on, instead of with Prefect's handler."""
    console, root = Console(), logging.getLogger()
    root.handlers = [console]
    return console
