"""The stages: Prefect task shells here, plain Python by subject in the packages below."""

import sys

if sys.argv[:1] == ["-m"]:  # Python looks for the module of `python -m tasks.…`: importing it will take a while
    from storage.interrupts import end_at_once

    end_at_once()
