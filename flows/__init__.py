"""The Prefect flows, one per module; read `math_mt_ppo` first. `launch` has their command line and Prefect servers.

Prefect reads these settings when it is imported. Without them client and servers report their use to its makers.
"""

import os

from storage.early import end_without_traceback

end_without_traceback()
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
