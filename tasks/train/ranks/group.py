"""The process group of the ranks, which they join by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

Ranks of one host that a flow has started meet in a file, which no other user may open, instead of at MASTER_PORT.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store
from torch.distributed.rendezvous import rendezvous


@contextmanager
def process_group(
    device: str, hosts: int, timeout_s: float, startup_timeout_s: float, meeting: Path | None = None
) -> Iterator[Store]:
    """Join the group of all ranks, and leave it at the end of the block; after an error the process must end.

    Args:
        device: `cpu` or `cuda`; the ranks of a host take its first GPUs, one each.
        hosts: number of hosts with equally many consecutive ranks.
        timeout_s: longest wait for another rank.
        startup_timeout_s: longest wait for the start of all ranks.
        meeting: a file through which the ranks of one host find each other; None: at MASTER_PORT.

    Yields:
        the store of the group, in which ranks can leave a note for the others.

    Raises:
        ValueError: MASTER_ADDR does not resolve, or leads other hosts to themselves; or there are too few GPUs.
        torch.distributed.DistError: not all ranks have come in time.
    """
    interface = interface_to(os.environ["MASTER_ADDR"], hosts)
    for library in ("GLOO", "NCCL"):  # otherwise they listen where the host's own name leads, which may be nowhere
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)
    rank, size, startup = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timedelta(seconds=startup_timeout_s)
    store: Store = FileStore(str(meeting), size) if meeting else next(rendezvous("env://", timeout=startup))[0]
    store.set_timeout(startup)
    store.set(f"started/{rank}", "")
    store.wait([f"started/{each}" for each in range(size)], startup)
    if device == "cuda":
        torch.cuda.set_device(gpu_of(rank % (size // hosts), torch.cuda.device_count()))
        torch.cuda.init()  # until then, a device mesh would choose another GPU by LOCAL_RANK
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
    yield store
    dist.destroy_process_group()  # not after an error: others may be in the middle of an exchange, and NCCL would wait


def gpu_of(place: int, visible: int) -> int:
    """Return the GPU of the rank with number `place` on its host, among the `visible` ones.

    Raises:
        ValueError: there is not one for each rank.
    """
    if place >= visible:
        raise ValueError(
            f"{socket.gethostname()} has {visible} visible GPUs, too few for its ranks (number {place} has none): use "
            "fewer ranks on each host (ppo.parallel, trainer.hosts), or let CUDA_VISIBLE_DEVICES name more GPUs"
        )
    return place


def interface_to(address: str, hosts: int) -> str:
    """Return the name of the network interface through which this host reaches `address`."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    except socket.gaierror as error:
        raise ValueError(
            f"MASTER_ADDR={address} does not resolve on {socket.gethostname()} ({error.strerror}): give the IP address "
            "of the flow's host in trainer.address"
        ) from None
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing
        own = ip_address(probe.getsockname()[0])
    if hosts > 1 and own.is_loopback and address != str(own):
        raise ValueError(
            f"MASTER_ADDR={address} is the loopback address {own} on {socket.gethostname()}: no other host reaches it. "
            "Give the IP address of the flow's host in trainer.address"
        )
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == family and ip_address(each.address.partition("%")[0]) == own for each in addresses):
            return name
    raise ValueError(f"no network interface of {socket.gethostname()} has the address {own}, which leads to {address}")
