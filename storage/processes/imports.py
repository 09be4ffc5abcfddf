"""Faster imports of large libraries at the start of a process."""

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def fast_imports(*left_out: str) -> Iterator[None]:
    """Import in the block without garbage collections, and as if the modules `left_out` were not installed.

    What is imported stays in memory, so that collections would find nothing in it, neither now nor later. Modules that
    were imported before are not left out.
    """
    collecting, hidden = gc.isenabled(), [name for name in left_out if name not in sys.modules]
    gc.disable()
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type] # None is how Python's import system defines it
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        gc.freeze()
        if collecting:
            gc.enable()
