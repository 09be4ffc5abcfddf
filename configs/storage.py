"""The knobs of the store."""

from typing import Annotated

from pydantic import Field, PositiveFloat

from configs.knobs import URI, Knobs


class Storage(Knobs):
    root: Annotated[URI, Field(min_length=1)] = "./var"
    """The root of the store that holds all versions: a local folder or `s3://bucket/prefix`."""
    cache: Annotated[str, Field(min_length=1)] = "./var/cache"
    """Local folder for copies of the versions of a remote root, and for logs of servers."""
    cache_gib: PositiveFloat = 100.0
    """Largest size of the copies of a remote root; the files that were unused for longest are deleted first."""
