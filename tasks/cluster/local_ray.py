"""Ray on this host alone: `cluster.address=local`, and trials with several nodes.

Its processes listen on the loopback address only, ask for a token, and end with the process that has started them,
however that ends. All their files, the token too, lie in one folder that no other user may enter. It has no dashboard,
exports no metrics, and sends no usage statistics.

    python -m tasks.cluster.local_ray FOLDER NODES CPUS GPUS     the process that starts Ray's
"""

import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from storage.processes.child import Child

_START_S = 120.0
_POLL_S = 0.05
_STORE_BYTES = 80 * 1024**2
"""Shared memory of a node for objects, Ray's least; messages are small."""
_ADDRESS, _TOKEN = "address", "token"
_FOLDER = "ray"
"""Folder of Ray, which gives it mode 0777, inside the one that no other user may enter."""
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # otherwise Ray takes 127.0.0.1 for the address of a network card
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_prestart_worker_first_driver": "0",
}


@contextmanager
def local_ray(log: Path, *, nodes: int = 1, cpus: int, gpus: Sequence[str] = ()) -> Iterator[tuple[str, Path]]:
    """Start Ray, yield its address and the file with its token, and end it with the block.

    Args:
        log: receives what its processes print.
        nodes: the number of nodes; more than one only for trials.
        cpus: how many processes of one core a node takes; the cores of this host may be fewer.
        gpus: the devices of the node, as CUDA_VISIBLE_DEVICES names them.

    Raises:
        RuntimeError: it did not start; the message has the end of its log.
    """
    ray = Child(log)
    try:
        token = ray.folder / _TOKEN
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        command = [sys.executable, "-P", "-m", "tasks.cluster.local_ray", str(ray.folder)]
        ray.start([*command, str(nodes), str(cpus), str(len(gpus))], _environment(ray.folder, gpus))
        deadline, note = time.monotonic() + _START_S, ray.folder / _ADDRESS
        while not note.exists():
            if not ray.alive or time.monotonic() > deadline:
                raise RuntimeError(f"Ray did not start on this host; the end of its log:\n{ray.log_tail()}")
            time.sleep(_POLL_S)
        yield note.read_text(), token
    finally:
        ray.close()


def _environment(folder: Path, gpus: Sequence[str]) -> Mapping[str, str]:
    package = str(Path(__file__).parents[2])
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
        "RAY_AUTH_TOKEN_PATH": str(folder / _TOKEN),
        "RAY_TMPDIR": str(folder / _FOLDER),
    }
    if gpus:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    others = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")}
    return others | _ENVIRONMENT | own


def main(folder: Path, nodes: int, cpus: int, gpus: int) -> None:
    """Run Ray's processes until a signal comes."""
    from ray.cluster_utils import Cluster

    own = folder / _FOLDER
    (own / "ray").mkdir(parents=True)  # where Ray notes the address, too
    cluster = Cluster()
    for number in range(nodes):
        cluster.add_node(
            num_cpus=cpus,
            num_gpus=gpus,
            node_ip_address="127.0.0.1",
            include_dashboard=False,
            include_log_monitor=False,
            no_monitor=True,
            object_store_memory=_STORE_BYTES,
            temp_dir=str(own),
            # Those in the folder of Ray's session may have too long paths for sockets.
            raylet_socket_name=str(own / f"node-{number}"),
            plasma_store_socket_name=str(own / f"store-{number}"),
        )
    (folder / f"{_ADDRESS}.new").write_text(cluster.address)
    (folder / f"{_ADDRESS}.new").rename(folder / _ADDRESS)
    signal.sigwait([signal.SIGTERM, signal.SIGINT])
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
