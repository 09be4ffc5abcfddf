"""The Prefect flows, one per module; read `math_mt_ppo` first. `launch` has their command line and Prefect servers.

Prefect reads these settings when it is imported. Without them client and servers report their use to its makers.
"""

import os

import storage  # noqa: F401 - Ctrl-C while the flow is imported

os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
