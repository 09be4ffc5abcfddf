"""A checkpoint's copy for servers: its model folder with weights in bfloat16.

serving/        the copy
delta/          in remote stores of earlier programs: `<file>.arrow` makes a file of weights from that of the parent's
                copy; the other files of the copy lie beside it

Such a delta is the XOR of both files, an Arrow file with their low and their high bytes as columns. A copy is made from
the last one that was stored whole and the deltas since. If that fails, servers read `model/`, which is always whole and
from which they make the same numbers.
"""

import logging
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage.errors import DamagedError
from storage.objects.store import Store
from storage.version_names import PolicyVersion, select
from storage.versions.fetch import Fetching, appearing, check_names, fetch, fetch_folder
from storage.versions.manifests import Manifest, read

SERVING, DELTA = "serving", "delta"
logger = logging.getLogger(__name__)


def fetch_copy(store: Store, manifest: Manifest, cache: Path, fetching: Fetching) -> Path | None:
    """Return a local folder with the copy, checked; None if there is none, or if it cannot be made from deltas.

    Raises:
        DamagedError: a file of a copy that is stored whole is missing or damaged, or does not belong to it.
    """
    whole, others = manifest.names_in(SERVING), manifest.names_in(DELTA)
    changed = {name.removesuffix(".arrow") for name in others} - whole
    if not changed:
        return fetch_folder(store, manifest, SERVING, cache, fetching=fetching) if whole else None
    folder = cache / manifest.version / manifest.nonce / SERVING
    try:
        for name in whole | changed:
            with appearing(folder / name) as partial:
                if f"{name}.arrow" in others:
                    _weights(store, manifest, name, cache).tofile(partial)
                else:
                    area = SERVING if name in whole else DELTA
                    shutil.copyfile(fetch(store, manifest, f"{area}/{name}", cache), partial)
    except DamagedError as error:
        logger.warning("%s: servers read model/, because %s", manifest.version, error)
        return None
    check_names(folder, whole | changed)
    return folder


def _weights(store: Store, manifest: Manifest, name: str, cache: Path) -> NDArray[np.uint16]:
    """Make the content of a file of weights from the last one that is whole and the deltas since.

    Raises:
        DamagedError: an object is missing or damaged.
    """
    deltas: list[Path] = []
    while name not in manifest.names_in(SERVING):
        deltas.append(fetch(store, manifest, f"{DELTA}/{name}.arrow", cache))
        manifest = read(store, select(PolicyVersion, manifest.parent_names)[0])
    numbers = np.fromfile(fetch(store, manifest, f"{SERVING}/{name}", cache), "<u2")
    for delta in reversed(deltas):
        with pa.memory_map(str(delta)) as file:
            changes = pa.ipc.open_file(file).read_all()
        numbers ^= (changes["high"].to_numpy().astype("<u2") << 8) | changes["low"].to_numpy()
    return numbers
