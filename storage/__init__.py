"""Versions in object storage: records, layout, manifests, data sets and checkpoints. The contract between stages."""

import os
import sys

if sys.argv[:1] == ["-m"]:  # Python looks for the module of `python -m storage`: importing it will take a while
    from storage.interrupts import end_at_once

    end_at_once()

# Torch makes this folder when it is imported, and loads code that it compiled from there. By default it has a name in
# TMPDIR that another user may have taken before.
if os.access(os.path.expanduser("~"), os.W_OK):
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.expanduser("~/.cache/math-mt-ppo/torchinductor"))
