"""Prefect flows: the pages to read first."""

import sys

if sys.argv[:1] == ["-m"]:  # Python looks for the module of `python -m flows.…`: importing Prefect will take seconds
    from storage.interrupts import end_at_once

    end_at_once()
