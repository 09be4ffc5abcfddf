"""Versions in object storage: records, layout, manifests, data sets and checkpoints. The contract between stages."""

import sys

if sys.argv[:1] == ["-m"]:  # Python looks for the module of `python -m storage`: importing it will take a while
    from storage.interrupts import end_at_once

    end_at_once()
