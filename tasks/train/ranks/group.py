"""The process group of the ranks, which they join by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

Ranks of one host that a flow has started meet in a file, which no other user may open, instead of at MASTER_PORT.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError


def open_store(hosts: int, timeout_s: float, meeting: Path | None = None) -> Store:
    """Open the store in which the ranks of a group leave notes for each other; the first rank keeps it.

    Args:
        hosts: number of hosts with equally many consecutive ranks.
        timeout_s: longest wait for the start of all ranks.
        meeting: a file through which the ranks of one host find each other; None: at MASTER_PORT.

    Raises:
        ValueError: MASTER_ADDR leads other hosts to themselves.
        torch.distributed.DistError: MASTER_ADDR does not resolve or is not reached, or the first rank has not come in
            time.
    """
    address = os.environ["MASTER_ADDR"]
    interface = interface_to(address, hosts)
    for library in ("GLOO", "NCCL"):  # otherwise they listen where the host's own name leads, which may be nowhere
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)
    rank, size = rank_and_size()
    timeout, port = timedelta(seconds=timeout_s), int(os.environ["MASTER_PORT"])
    store: Store
    if meeting:
        store = FileStore(str(meeting), size)
    else:
        store = TCPStore(address, port, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    store.set_timeout(timeout)
    return store


def rank_and_size() -> tuple[int, int]:
    """Return the number of this rank and the number of ranks, from RANK and WORLD_SIZE."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def meet(store: Store, rank: int, size: int, problem: str = "") -> Store:
    """Wait until all ranks are here, and return their store.

    Args:
        store: see `open_store`.
        rank: the number of this rank.
        size: the number of ranks.
        problem: why this rank cannot work, which all raise.

    Raises:
        ValueError: a rank has a problem.
        torch.distributed.DistError: not all have come in time; or all have, but this rank belongs to the next start.
    """
    if store.check(["complete"]):  # this host starts again before the first rank, which keeps the store, has ended
        raise DistStoreError("the ranks of the last start have not ended yet")
    store.set(f"started/{rank}", problem)
    started = [f"started/{each}" for each in range(size)]
    try:
        store.wait(started)
    except RuntimeError as error:  # not always a DistError: FileStore raises no other type
        if problem:
            raise ValueError(f"rank {rank} cannot start: {problem}") from error
        raise DistStoreError(f"not all ranks have come: {_leave(store, rank, started)}") from error
    store.set("complete", "")
    for number, key in enumerate(started):
        if text := store.get(key).decode():
            raise ValueError(f"rank {number} cannot start: {text}")
    return store


def _leave(store: Store, rank: int, started: Sequence[str]) -> str:
    """Take back that this rank is here, and name those that have not come, if the store still answers."""
    try:
        missing = [key.removeprefix("started/") for key in started if not store.check([key])]
        store.delete_key(f"started/{rank}")
        return f"missing are {', '.join(missing)}"
    except RuntimeError as error:
        return f"the first one has ended ({error})"


@contextmanager
def process_group(device: str, store: Store, timeout_s: float) -> Iterator[None]:
    """Join the group of all ranks, and leave it at the end of the block; after an error the process must end.

    Args:
        device: `cpu` or `cuda`.
        store: see `meet`.
        timeout_s: longest wait for another rank.
    """
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")  # else it connects within a later message, without a time limit
    backend, (rank, size) = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", rank_and_size()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
    yield
    dist.destroy_process_group()  # not after an error: others may be in the middle of an exchange, and NCCL would wait


def take_gpu(number: int) -> str:
    """Use the GPU of the rank with `number` on its host from now on; return why it cannot be used, or nothing."""
    try:
        torch.cuda.set_device(gpu_of(number, torch.cuda.device_count()))
        torch.cuda.init()  # until then, a device mesh would choose another GPU by LOCAL_RANK
    except Exception as error:  # noqa: BLE001 # all ranks must hear of it, or they would wait for this one
        return f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return ""


def gpu_of(number: int, visible: int) -> int:
    """Return the GPU of the rank with `number` on its host, among the `visible` ones.

    Raises:
        ValueError: there is not one for each rank.
    """
    if number >= visible:
        raise ValueError(
            f"{socket.gethostname()} has {visible} visible GPUs, too few for its ranks (number {number} has none): use "
            "fewer ranks on each host (ppo.parallel, trainer.hosts), or let CUDA_VISIBLE_DEVICES name more GPUs"
        )
    return number


def interface_to(address: str, hosts: int) -> str:
    """Return the name of the network interface through which this host reaches `address`.

    Raises:
        ValueError: it leads other hosts to themselves.
        torch.distributed.DistNetworkError: it does not resolve, or the network is not reached.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    except socket.gaierror as error:  # perhaps not yet
        raise DistNetworkError(
            f"MASTER_ADDR={address} does not resolve on {socket.gethostname()} ({error.strerror}): give the IP address "
            "of the flow's host in trainer.address"
        ) from None
    with socket.socket(family, kind) as probe:
        try:
            probe.connect(target)  # sends nothing
        except OSError as error:
            raise DistNetworkError(
                f"MASTER_ADDR={address} is not reached from {socket.gethostname()}: {error}"
            ) from None
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
