"""The right to write a run, as those who write see it."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Fence(Protocol):
    """The right to write a run (`storage.logs.leases.Lease`)."""

    token: int

    def check(self) -> None:
        """Raises StorageError where the right was lost to another."""
