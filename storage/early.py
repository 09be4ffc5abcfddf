"""Ctrl-C while a command is imported, which takes seconds, before `storage.interrupts.run`."""

import os
import signal
import sys


def end_without_traceback() -> None:
    """Let Ctrl-C end the process at once, but only while Python looks for the module of `python -m`.

    The packages call it when they are imported.
    """
    if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))
