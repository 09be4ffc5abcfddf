"""The mesh of the ranks that train together, and what they tell each other."""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from configs.cluster import Trainer
from configs.train import Parallel
from tasks.train.memory import BUCKET


@dataclass(frozen=True)
class Mesh:
    """`size` processes, of which this one is `rank`; one process without a group is a mesh, too.

    Every rank runs the same program on the same data, and only the passes over models are dealt out. So all ranks must
    call these methods equally often, in the same order.
    """

    rank: int = 0
    size: int = 1
    of_host: int = 1
    """The number of ranks on each host; they have consecutive numbers."""
    devices: DeviceMesh | None = field(default=None, compare=False)
    """Its dimensions are `replicate`, if there are several copies, and `shard`. None: every rank has a whole copy."""

    @classmethod
    def of(cls, parallel: Parallel, device: str, trainer: Trainer) -> "Mesh":
        """Return the mesh of the process group that exists, or of this process alone.

        Args:
            parallel: its shape.
            device: `cpu` or `cuda`.
            trainer: its number of hosts, and the time limit of its groups.

        Raises:
            ValueError: the number of ranks is another than that of `parallel`.
        """
        if not dist.is_initialized():
            return cls()
        if dist.get_world_size() != parallel.ranks:
            raise ValueError(
                f"{dist.get_world_size()} ranks were started, but ppo.parallel={{replicate: {parallel.replicate}, "
                f"shard: {parallel.shard}}} needs {parallel.ranks}: start as many, or change ppo.parallel"
            )
        place = dist.get_rank(), parallel.ranks, parallel.ranks // trainer.hosts
        _connect(device, None)
        if parallel.shard == 1:
            return cls(*place)
        devices = init_device_mesh(device, (parallel.replicate, parallel.shard), mesh_dim_names=("replicate", "shard"))
        for group in devices.get_all_groups():  # torch gives new groups a time limit of its own
            _set_pg_timeout(timedelta(seconds=trainer.timeout_s), group)
            _connect(device, group)
        return cls(*place, devices if parallel.replicate > 1 else devices["shard"])

    @property
    def host(self) -> int:
        """The number of this rank's host."""
        return self.rank // self.of_host

    @property
    def is_first_of_host(self) -> bool:
        return self.rank % self.of_host == 0

    @contextmanager
    def in_turns(self) -> Iterator[None]:
        """Run the block in the first rank of each host before the others, which then find its files in the cache."""
        if self.size == 1:
            yield
            return
        if not self.is_first_of_host:
            dist.barrier()
        yield
        if self.is_first_of_host:
            dist.barrier()

    def share(self, sizes: Sequence[int]) -> list[int]:
        """Deal work out to the ranks of each host; return the places in `sizes` that are this rank's."""
        owners = deal_out(sizes, self.of_host)
        return [place for place, owner in enumerate(owners) if owner == self.rank % self.of_host]

    def wait(self) -> None:
        """Wait until all ranks are here."""
        if self.size > 1:
            dist.barrier()

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, on the CPU; their shapes are equal."""
        total = values.cpu()
        if self.size > 1:
            total = total.clone()
            dist.all_reduce(total)
        return total

    def any(self, flag: bool) -> bool:
        """Return whether one rank says yes, so that all decide alike."""
        return bool(self.total(torch.tensor(int(flag))))

    def as_first(self, value: Tensor) -> Tensor:
        """Return the first rank's value of what the copies of a shard compute alike.

        Each copy reduces it in a group of its own, and NCCL may add in another order there.
        """
        if self.devices is not None and self.devices.ndim > 1:
            dist.broadcast(value, 0)
        return value

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors of equal shapes on all ranks by their sums, in buckets, since each message takes time."""
        bucket: list[Tensor] = []
        for tensor in tensors:
            bucket.append(tensor)
            if sum(each.numel() for each in bucket) >= BUCKET:
                _add_up(bucket)
                bucket = []
        if bucket:
            _add_up(bucket)

    def gather(self, columns: Tensor) -> Tensor:
        """Join the ranks' columns [K, A] of different lengths A, in the order of the ranks, on the CPU."""
        columns = columns.cpu()
        if self.size == 1:
            return columns
        return torch.cat(gather_parts(columns), 1)


def gather_parts(columns: Tensor) -> list[Tensor]:
    """Return the columns [K, A] of each rank of the group, in their order; their lengths A may differ."""
    lengths = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    lengths[dist.get_rank()] = columns.shape[1]
    dist.all_reduce(lengths)
    padded = columns.new_zeros(len(columns), int(lengths.max()))
    padded[:, : columns.shape[1]] = columns
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return [part[:, :length] for part, length in zip(parts, lengths.tolist(), strict=True)]


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


def _add_up(tensors: list[Tensor]) -> None:
    joined = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(joined)
    for tensor, total in zip(tensors, joined.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))


ALONE = Mesh()
"""The mesh of one process without a group."""
