"""Runs programs such as `python -m storage` in this process."""

import io
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch


def call_program(main: Callable[[], int], *arguments: str, status: int = 0) -> tuple[str, str]:
    """Call `main` with a command line and check its exit status; return what it prints, and its errors."""
    out, errors, handler = io.StringIO(), io.StringIO(), signal.getsignal(signal.SIGPIPE)
    try:
        with patch.object(sys, "argv", ["program", *arguments]), redirect_stdout(out), redirect_stderr(errors):
            code: object = main()
    except SystemExit as ended:  # argparse exits after help and after a wrong command
        code = ended.code
    finally:
        signal.signal(signal.SIGPIPE, handler)
    assert code == status, out.getvalue() + errors.getvalue()
    return out.getvalue(), errors.getvalue()
