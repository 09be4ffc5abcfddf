"""Stores that earlier versions of the programs made, as archives in `tests/kept_stores`."""

import tarfile
from pathlib import Path

from storage.objects.store import Store
from tests.support.paths import ROOT

KEPT = ROOT / "tests/kept_stores"


def unpack_kept(name: str, folder: Path) -> Store:
    """Unpack a store in another folder than it was made in."""
    with tarfile.open(KEPT / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return Store(str(folder / "store"))
