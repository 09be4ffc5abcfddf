"""`make cluster-demo`: the demo on a Ray cluster of three nodes, which are simulated on this machine.

Each node has a vLLM server of its own. On two cores that is slower than `make demo`; it shows that the same command and
the same versions do on many hosts.
"""

import argparse

from flows.launch.cli import ADVICE, share_cores
from flows.launch.temporary_server import temporary_server
from flows.math_mt_ppo import math_mt_ppo
from storage import interrupts
from storage.commands.program import whole
from tests.support.simulated_cluster import simulated_cluster

SETTINGS = ["run.name=cluster-demo", "run.iterations=20", "score.workers=1", "cluster.silence_s=120"]


def main() -> None:
    """Run the command line, which takes dotted overrides."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides: run.iterations=100")
    parser.add_argument("--nodes", type=whole(1), default=3, help="number of nodes; default 3")
    arguments = parser.parse_args()
    share_cores()
    with temporary_server(), simulated_cluster(arguments.nodes) as address:
        print(f"a simulated cluster of {arguments.nodes} nodes is up at {address}", flush=True)
        math_mt_ppo("demo", [*SETTINGS, f"cluster.address={address}", *arguments.overrides])


if __name__ == "__main__":
    interrupts.run(main, ADVICE)
