"""The Prefect flows, one per module; read `math_mt_ppo` first. `launch` has their command line and Prefect servers.

Prefect reads these settings when it is imported. Without them client and servers report their use to its makers.
"""

import gc
import os
import sys

import storage  # noqa: F401 - Ctrl-C while the flow is imported

os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")

# Prefect is imported without pandas, which it needs for cache keys only, and without garbage collections, which find
# nothing in what is imported: `--help` of a flow takes 1.5 s instead of 2.1.
gc.disable()
with_pandas = sys.modules.setdefault("pandas", None)  # type: ignore[arg-type] # as Python's import system defines it
import prefect.cache_policies  # noqa: E402, F401

if with_pandas is None:
    del sys.modules["pandas"]
gc.freeze()
gc.enable()
