"""Runs programs such as `python -m storage` in this process."""

import contextlib
import io
import signal
import sys
from collections.abc import Callable
from unittest.mock import patch


def call_program(main: Callable[[], int], *arguments: str, status: int = 0) -> tuple[str, str]:
    """Call `main` with a command line and check its exit status; return what it prints, and its errors."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(sys, "argv", ["program", *arguments]))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(errors))
        stack.callback(signal.signal, signal.SIGPIPE, signal.getsignal(signal.SIGPIPE))
        try:
            code: object = main()
        except SystemExit as ended:  # argparse exits after help and after a wrong command
            code = ended.code
    assert code == status, out.getvalue() + errors.getvalue()
    return out.getvalue(), errors.getvalue()
