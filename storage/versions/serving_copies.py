"""A checkpoint's copy for servers: its model folder with weights in bfloat16, whole or as what changed.

serving/        the copy, if it is stored whole: what `model/` has, with weights in bfloat16
delta/          `<file>.arrow` makes a file of weights from that of the parent's copy; the other files of the copy are
                here, too, if it is not stored whole

Who has the parent's copy in its cache fetches the delta, and the hash of the result proves it. Others fetch the last
whole copy and the deltas since. If these are larger than `model/`, or gc has deleted what they need, they use `model/`,
which is always whole and from which servers make the same numbers. So no version needs another one.

A delta has a few per cent of the bytes: a small update leaves most bfloat16 numbers as they are, and changes the low
bits of the others. So the XOR of both files is mostly zeros. Its low and its high bytes are the two columns of an Arrow
file, compressed with zstd.
"""

import contextlib
import hashlib
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage.errors import DamagedError
from storage.objects.store import Store, has_content, sha256
from storage.version_names import PolicyVersion, select
from storage.versions.drafts import Draft
from storage.versions.fetch import Fetching, appearing, fetch_all, local_path, strays_in, turn
from storage.versions.manifests import File, Manifest, read

WHOLE_COPY_EVERY = 20
"""A remote store holds each 20th copy whole, and only what changed of the others."""
SERVING, DELTA = "serving", "delta"
_WEIGHTS, _ARROW = ".safetensors", ".arrow"
_NUMBERS = 2**20
"""Numbers in a record batch: the unit of compression, and of work for a thread."""
_THREADS = 8
_COLUMNS = ("low", "high")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServingCopy:
    """The copy of one version, as far as its manifest says, and as a folder of the local cache."""

    store: Store
    manifest: Manifest
    cache: Path
    fetching: Fetching = fetch_all
    """Fetches files; processes that share the cache may deal them out."""

    @cached_property
    def whole(self) -> dict[str, File]:
        """The files of the copy that are stored whole, by name."""
        return self._files_in(SERVING)

    @cached_property
    def weights(self) -> set[str]:
        """The names of the files of weights in the copy; empty if there is no copy."""
        names = {*self.whole, *(name.removesuffix(_ARROW) for name in self._files_in(DELTA))}
        return {name for name in names if name.endswith(_WEIGHTS)}

    @cached_property
    def others(self) -> dict[str, File]:
        """The other files of the copy, by name."""
        files = self._files_in(DELTA) | self.whole
        return {name: file for name, file in files.items() if not name.endswith((_WEIGHTS, _ARROW))}

    @property
    def names(self) -> set[str]:
        """The names of all its files."""
        return self.weights | self.others.keys()

    @cached_property
    def folder(self) -> Path:
        """The local folder of the whole copy: in the cache, or in a local store."""
        place = f"{self.manifest.version}/{self.manifest.nonce}/{SERVING}"
        is_stored = self.whole.keys() >= self.names
        return Path(self.store.path(place)) if self.store.is_local and is_stored else self.cache / place

    def delta(self, name: str) -> File | None:
        """Return the object that makes a file of weights from the parent's."""
        return self._files_in(DELTA).get(name + _ARROW)

    def parent(self) -> "ServingCopy | None":
        """Return the copy of the policy from which this one was trained."""
        policies = select(PolicyVersion, self.manifest.parent_names)
        return replace(self, manifest=read(self.store, policies[0])) if policies else None

    def fetch(self, file: File) -> Path:
        """Return a local copy of an object, checked."""
        self.fetching(self.store, [file], self.cache)
        return local_path(self.store, file, self.cache)

    def _files_in(self, area: str) -> dict[str, File]:
        inside = [file for file in self.manifest.files if file.name.startswith(f"{area}/")]
        return {file.name.removeprefix(f"{area}/"): file for file in inside}


def add_copy(draft: Draft, folder: Path, parent: ServingCopy, whole_every: int) -> None:
    """Add a copy to the draft of a policy: what changed since the parent's, and every so many-th time the whole.

    Several ranks add the files that each has written. Weights that are not stored whole are moved into the cache, where
    the next delta and a server on this host need them.
    """
    whole = PolicyVersion(draft.version).number % whole_every == 0 or not parent.weights
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if not name.endswith(_WEIGHTS):
            draft.add(path, f"{SERVING if whole else DELTA}/{name}")
            continue
        base = fetch_weights(parent, name) if whole_every > 1 and name in parent.weights else None
        has_delta = base is not None and _add_delta(draft, base, path, name)
        if whole or not has_delta:
            draft.add(path, f"{SERVING}/{name}")
        else:
            kept = parent.cache / draft.version / draft.nonce / SERVING / name
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, kept)


def _add_delta(draft: Draft, base: Path, path: Path, name: str) -> bool:
    """Add what changed in a file of weights; return False if the whole is smaller, or the size is another."""
    delta, size = path.with_name(path.name + _ARROW), path.stat().st_size
    if base.stat().st_size != size:
        return False
    write_delta(base, path, delta)
    if delta.stat().st_size > size:  # a large step changed most numbers
        return False
    draft.add(delta, f"{DELTA}/{name}{_ARROW}")
    return True


def fetch_copy(copy: ServingCopy) -> Path | None:
    """Return a local folder with the whole copy, checked; None if there is none, or if `model/` is less to fetch.

    Raises:
        DamagedError: an object is missing or damaged, or the folder has a file that does not belong to the copy.
    """
    for name in sorted(copy.weights):
        if (path := fetch_weights(copy, name)) is None:
            return None
        _place(path, copy.folder / name)
    for name, file in copy.others.items():
        _place(copy.fetch(file), copy.folder / name)
    if extra := strays_in(copy.folder, copy.names):
        raise DamagedError(f"{copy.folder} holds {extra[0]}, and libraries would load that, too: delete it")
    return copy.folder if copy.weights else None


def _place(source: Path, target: Path) -> None:
    if source != target:
        with appearing(target) as partial:
            shutil.copyfile(source, partial)


def fetch_weights(copy: ServingCopy, name: str) -> Path | None:
    """Return a local file of a copy's weights, checked; None if that of `model/` is less to fetch, or all there is.

    Raises:
        DamagedError: the file is stored whole, but is missing or damaged.
    """
    whole = copy.whole.get(name)
    if whole and not _is_near(copy, name):
        return copy.fetch(whole)
    try:
        return restore(copy, name)
    except DamagedError as error:
        logger.warning("%s: %s is fetched whole, because %s", copy.manifest.version, name, error)
    return copy.fetch(whole) if whole else None


def _is_near(copy: ServingCopy, name: str) -> bool:
    """Return whether a file is one delta away from what the cache has."""
    if not copy.delta(name) or (copy.folder / name).is_file():
        return False
    parent = copy.parent()
    return parent is not None and (parent.folder / name).is_file()


def restore(copy: ServingCopy, name: str) -> Path | None:
    """Return a local file of weights that is made from deltas, or was.

    None if there are no deltas that lead to it, or if they need more bytes than `model/`.

    Raises:
        DamagedError: what it is made from is missing or damaged; a damaged file of the cache is deleted.
    """
    target, delta = copy.folder / name, copy.delta(name)
    if delta is None:
        return None
    with turn(copy.cache, str(target), of="copy"):  # other processes of this host find it ready
        if has_content(target, *result_of(copy.fetch(delta))):
            os.utime(target)
            return target
        base, deltas = _steps(copy, name)
        if base is None:
            return None
        path = copy.fetch(base) if isinstance(base, File) else base
        try:
            apply_deltas(path, [copy.fetch(each) for each in deltas], target)
        except DamagedError:
            if isinstance(base, Path):
                base.unlink(missing_ok=True)
            raise
        return target


def _steps(copy: ServingCopy, name: str) -> tuple[Path | File | None, list[File]]:
    """Return the nearest file from which deltas lead to a file of weights, and these, the first one first."""
    deltas: list[File] = []
    most = next((file.bytes for file in copy.manifest.files if file.name == f"model/{name}"), None)
    while (delta := copy.delta(name)) and (parent := copy.parent()):
        deltas.insert(0, delta)
        if most is not None and sum(each.bytes for each in deltas) > most:
            break
        if (near := parent.folder / name).is_file():
            return near, deltas
        if whole := parent.whole.get(name):
            return whole, deltas
        copy = parent
    return None, []


def write_delta(base: Path, new: Path, delta: Path) -> None:
    """Write what makes the file `new` from the file `base`, which has as many bytes, an even number."""
    made: dict[bytes | str, bytes | str] = {"bytes": str(new.stat().st_size), "sha256": sha256(new)}
    schema = pa.schema([pa.field(name, pa.uint8(), nullable=False) for name in _COLUMNS], made)
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", 1))
    before, after = (np.memmap(path, "<u2", mode="r") for path in (base, new))
    with pa.OSFile(str(delta), "wb") as file, pa.ipc.new_file(file, schema, options=options) as writer:
        for start in range(0, len(after), _NUMBERS):
            change = after[start : start + _NUMBERS] ^ before[start : start + _NUMBERS]
            columns = [pa.array(change.astype(np.uint8)), pa.array((change >> 8).astype(np.uint8))]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))


def result_of(delta: Path) -> tuple[int, str]:
    """Return size and sha256 of the file that a delta makes, without reading its numbers.

    Raises:
        DamagedError: the file is no delta.
    """
    with _opened(delta) as reader:
        notes = reader.schema.metadata or {}
        try:
            return int(notes[b"bytes"]), notes[b"sha256"].decode()
        except (KeyError, ValueError) as error:
            raise DamagedError(f"{delta} is no delta: it does not say what it makes ({error!r})") from error


def apply_deltas(base: Path, deltas: Sequence[Path], target: Path) -> None:
    """Make a file from `base` with one delta after the other, and prove it by its hash.

    Raises:
        DamagedError: a file is no delta, or the result is not the file that the last delta names, because `base` is not
            the file for which the first delta was written.
    """
    size, digest = result_of(deltas[-1])
    wrong = DamagedError(f"{deltas[-1]} makes another file than it says from {base}: one of the two is damaged")
    if base.stat().st_size != size:
        raise wrong
    words, hashed = np.memmap(base, "<u2", mode="r"), hashlib.sha256()
    parts = range(-(-len(words) // _NUMBERS))
    with appearing(target) as partial, contextlib.ExitStack() as stack:
        readers = [stack.enter_context(_opened(delta)) for delta in deltas]
        threads = stack.enter_context(ThreadPoolExecutor(_THREADS))
        file = stack.enter_context(partial.open("wb"))
        for first in parts[::_THREADS]:  # not all at once: they would all be in memory
            for made in threads.map(lambda part: _made(words, readers, part), parts[first : first + _THREADS]):
                file.write(made.data)
                hashed.update(made.data)
        if hashed.hexdigest() != digest:
            raise wrong


def _made(base: NDArray[np.uint16], readers: Sequence[pa.ipc.RecordBatchFileReader], part: int) -> NDArray[np.uint16]:
    """Apply one record batch of each delta to the same part of `base`."""
    words = base[part * _NUMBERS : (part + 1) * _NUMBERS].copy()
    try:
        for reader in readers:
            batch = reader.get_batch(part)
            batch.validate(full=True)
            low, high = (column.to_numpy() for column in batch.columns)
            words ^= (high.astype(np.uint16) << 8) | low
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DamagedError(f"a delta cannot be read: {error}") from error
    return words


@contextlib.contextmanager
def _opened(delta: Path) -> Iterator[pa.ipc.RecordBatchFileReader]:
    with pa.memory_map(str(delta)) as file:
        try:
            reader = pa.ipc.open_file(file)
            fields = {field.name: field.type for field in reader.schema}
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DamagedError(f"{delta} is no delta: {error}") from error
        if fields != dict.fromkeys(_COLUMNS, pa.uint8()):
            raise DamagedError(f"{delta} is no delta: its columns are {fields}")
        yield reader
