"""The protocol of a lease that writers use."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Fence(Protocol):
    """The right to write a run (`storage.logs.leases.Lease`)."""

    token: int

    def check(self) -> None:
        """Raise StorageError if another writer has taken over the lease."""
