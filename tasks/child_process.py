"""Errors and log records that child processes of this program send to the process that started them."""

import logging
import traceback
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

Log = tuple[str, int, str]
"""Name of the logger, level and text."""


def sendable(error: Exception, where: str) -> Exception:
    """Return the error with its traceback as a note, or a RuntimeError with its text if the error cannot be sent.

    Args:
        error: the error that is being handled.
        where: names this process, such as "the trainer's process".
    """
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))  # as a connection does
    except Exception:  # noqa: BLE001 # errors of libraries may raise anything
        error = RuntimeError("".join(traceback.format_exception_only(error)).strip())
    error.add_note(f"in {where}:\n{traceback.format_exc()}")
    return error


def forward_logs(send: Callable[[Log], None]) -> None:
    """Send what is logged to the flow's process, and nowhere else: importing Prefect has added handlers here, too."""
    for logger in logging.Logger.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.handlers, logger.propagate = [], True
    logging.getLogger().handlers = [_Forwarder(send)]


def log_again(log: Log, prefix: str = "") -> None:
    """Log here what a child process has logged."""
    name, level, text = log
    logging.getLogger(name).log(level, "%s%s", prefix, text)


class _Forwarder(logging.Handler):
    def __init__(self, send: Callable[[Log], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send((record.name, record.levelno, self.format(record)))
