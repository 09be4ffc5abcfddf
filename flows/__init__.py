"""Prefect flows: the pages to read first."""

import sys

from storage.interrupts import end_at_once

if sys.argv[0] == "-m":  # Python looks for the module of `python -m flows.…`: importing Prefect will take seconds
    end_at_once()
