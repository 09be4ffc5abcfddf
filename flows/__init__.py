"""The Prefect flows, one per module; read `math_mt_ppo` first. `launch` has their command line and Prefect servers.

Prefect reads these settings when it is imported. Without them client and servers report their use to its makers.
"""

import os

import storage  # noqa: F401 - Ctrl-C while the flow is imported
from storage.processes.imports import fast_imports

os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")

# `--help` of a flow takes 1.5 s instead of 2.1. Prefect needs pandas only for cache keys.
with fast_imports("pandas"):
    import prefect.cache_policies  # noqa: F401
