"""The knobs of the store."""

from typing import Annotated

from pydantic import Field, PositiveFloat

from configs.knobs import URI, Knobs, NonNegativeInt


class Keep(Knobs):
    """The checkpoints that a run keeps; the data of others are deleted after each update, as by `storage gc`."""

    last: Annotated[int, Field(ge=2)] = 2
    """Number of newest checkpoints to keep whole. The servers may still read the one before the newest."""
    every: NonNegativeInt = 20
    """Keep also every checkpoint whole whose number is a multiple of this, so that forks can begin there; 0: none for
    this reason. Number 0, and those that an alias points at or another run began with or names, are always kept whole;
    those that were evaluated keep their weights, but not the state of the optimizer."""


class Storage(Knobs):
    root: Annotated[URI, Field(min_length=1)] = "./var"
    """The root of the store that holds all versions: a local folder or `s3://bucket/prefix`."""
    cache: Annotated[str, Field(min_length=1)] = "./var/cache"
    """Local folder for copies of the versions of a remote root, and for logs of servers."""
    cache_gib: PositiveFloat = 100.0
    """Largest size of the copies of a remote root; the files that were unused for longest are deleted first."""
    keep: Keep | None = Keep()
    """The checkpoints that a run keeps; empty: all of them."""
