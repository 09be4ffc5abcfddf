"""The mesh of the ranks that train together, and the messages between them.

The ranks meet by notes, which the first rank keeps. Ray carries the notes, and asks for its token. So no rank listens
at a port for others; only gloo and NCCL open connections between the ranks, on the loopback interface if all ranks are
on one node.
"""

import heapq
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from jaxtyping import Num
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from configs.train import Parallel

_POLL_S = 0.02
"""Time between two requests for a note that another rank has not written yet."""


@dataclass(frozen=True)
class Mesh:
    """`size` processes, of which this one is `rank`; one process without a group is a mesh, too.

    Every rank runs the same program on the same data, and only the passes over models are dealt out. So all ranks must
    call these methods equally often, in the same order.
    """

    rank: int = 0
    size: int = 1
    neighbours: tuple[int, ...] = (0,)
    """The ranks on this rank's node, with itself."""
    devices: DeviceMesh | None = field(default=None, compare=False)
    """Its dimensions are `replicate`, if there are several copies, and `shard`. None: there is one rank."""

    @classmethod
    def of(cls, parallel: Parallel, device: str, timeout_s: float, nodes: Sequence[str]) -> "Mesh":
        """Return the mesh of the process group that exists.

        Args:
            parallel: its shape.
            device: `cpu` or `cuda`.
            timeout_s: longest wait for another rank.
            nodes: the node of each rank.
        """
        rank = dist.get_rank()
        neighbours = tuple(each for each, node in enumerate(nodes) if node == nodes[rank])
        _connect(device, None)
        devices = init_device_mesh(device, (parallel.replicate, parallel.shard), mesh_dim_names=("replicate", "shard"))
        for group in devices.get_all_groups():  # torch gives new groups a time limit of its own
            _set_pg_timeout(timedelta(seconds=timeout_s), group)
            _connect(device, group)
        return cls(rank, parallel.ranks, neighbours, devices if parallel.replicate > 1 else devices["shard"])

    def assigned(self, sizes: Sequence[int]) -> list[int]:
        """Deal work out to the ranks of each node; return the indices in `sizes` that are this rank's."""
        owners = deal_out(sizes, len(self.neighbours))
        return [index for index, owner in enumerate(owners) if self.neighbours[owner] == self.rank]

    def wait(self) -> None:
        """Wait until all ranks have called this."""
        if self.size > 1:
            dist.barrier()

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, on the CPU; their shapes are equal."""
        total = values.cpu()
        if self.size > 1:
            total = total.clone()
            dist.all_reduce(total)
        return total

    def as_first(self, value: Tensor) -> Tensor:
        """Return the first rank's value of a number that all copies of a shard compute.

        Each copy reduces the number in a group of its own, where NCCL may add in another order.
        """
        if self.devices is not None and self.devices.ndim > 1:
            dist.broadcast(value, 0)
        return value

    def gather(self, columns: Num[Tensor, "columns own"]) -> Num[Tensor, "columns all"]:
        """Join the ranks' columns, whose lengths may differ, one rank after the other, on the CPU."""
        columns = columns.cpu()
        if self.size == 1:
            return columns
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = columns.shape[1]
        dist.all_reduce(lengths)
        padded = columns.new_zeros(len(columns), int(lengths.max()))
        padded[:, : columns.shape[1]] = columns
        gathered = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(gathered, padded)
        return torch.cat([each[:, :length] for each, length in zip(gathered, lengths.tolist(), strict=True)], 1)


def _connect(device: str, group: dist.ProcessGroup | None) -> None:
    """Send a message through a group: NCCL connects its ranks only then, and without a time limit."""
    message = torch.zeros(1, device=device)
    dist.all_reduce(message, group=group)
    message.cpu()  # waits for it


def deal_out(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return a rank for each size so that all have about as much: the largest first, to the rank with the least.

    >>> deal_out([1, 5, 3], 2)
    [1, 0, 1]
    """
    held = [(0, rank) for rank in range(ranks)]  # a heap
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        size, owners[index] = held[0]
        heapq.heapreplace(held, (size + sizes[index], owners[index]))
    return owners


ALONE = Mesh()
"""The mesh of one process without a group."""


class NoteStore(Store):
    """A store of notes, by which the ranks of a process group find each other.

    Args:
        ask: calls a method of `new_notes`, wherever they are.
        timeout_s: longest wait for a note.
    """

    def __init__(self, ask: Callable[..., Any], timeout_s: float) -> None:
        super().__init__()
        self._ask, self._timeout = ask, timedelta(seconds=timeout_s)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._ask("get", key))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return bytes(self._ask("compare_set", key, expected, desired))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit = timeout or self._timeout
        deadline = time.monotonic() + limit.total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"no note {', '.join(keys)} of another rank came within {limit}")
            time.sleep(_POLL_S)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete_key", key))

    def clone(self) -> "NoteStore":
        return self


def new_notes() -> Store:
    """Return what the first rank keeps for a `NoteStore` of each."""
    return dist.HashStore()  # type: ignore[attr-defined]


def join_group(rank: int, size: int, device: str, store: Store, address: str, timeout_s: float) -> None:
    """Join the group of all ranks.

    Args:
        rank: the number of this rank.
        size: the number of ranks.
        device: `cpu` or `cuda`.
        store: where the ranks meet.
        address: the IP address at which the other ranks reach this one.
        timeout_s: longest wait for another rank.
    """
    interface = interface_of(address)
    for library in ("GLOO", "NCCL"):  # otherwise they listen where the host's own name leads, which may be nowhere
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")  # else it connects within a later message, without a time limit
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))


def lost_another(error: BaseException) -> bool:
    """Return whether an error says that another rank has ended or does not answer."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def take_gpu() -> None:
    """Use the GPU that this process sees from now on: Ray shows one to each rank."""
    torch.cuda.set_device(0)
    torch.cuda.init()  # until then, a device mesh would choose another GPU


def interface_of(address: str) -> str:
    """Return the name of the network interface that has an IP address.

    Raises:
        ValueError: there is none.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    raise ValueError(f"no network interface of {socket.gethostname()} has {address}, by which Ray knows this node")
