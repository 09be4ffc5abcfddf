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
import shutil
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage.errors import DamagedError
from storage.objects.store import Store, sha256
from storage.version_names import PolicyVersion, version_of
from storage.versions.drafts import Draft
from storage.versions.fetch import Fetching, fetch_all, local_path, strays_in, touch, turn
from storage.versions.manifests import File, Manifest, read

WHOLE_COPY_EVERY = 20
"""Of the copies in a remote store every so many-th is stored whole, and of the others only what changed."""
SERVING, DELTA = "serving", "delta"
_WEIGHTS, _ARROW = ".safetensors", ".arrow"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServingCopy:
    """The copy of one version, as far as its manifest says, and as a folder of the local cache."""

    store: Store
    manifest: Manifest
    cache: Path
    fetching: Fetching = fetch_all
    """Fetches files; processes that share the cache may take turns."""

    @cached_property
    def files(self) -> dict[str, File]:
        """The files of the version by name."""
        return {file.name: file for file in self.manifest.files}

    @property
    def is_whole(self) -> bool:
        """Whether all of it is stored."""
        return f"{SERVING}/config.json" in self.files and all(map(self.whole, self.weights))

    @cached_property
    def folder(self) -> Path:
        """The local folder of the whole copy: in the cache, or in a local store."""
        place = f"{self.manifest.version}/{self.manifest.nonce}/{SERVING}"
        return Path(self.store.path(place)) if self.store.is_local and self.is_whole else self.cache / place

    @cached_property
    def weights(self) -> set[str]:
        """The names of the files of weights in the copy; empty if there is no copy."""
        return {name for name in (*self._names(SERVING, ""), *self._names(DELTA, _ARROW)) if name.endswith(_WEIGHTS)}

    @property
    def others(self) -> dict[str, File]:
        """The other files of the copy, by name."""
        area = SERVING if f"{SERVING}/config.json" in self.files else DELTA
        return {
            name: self.files[f"{area}/{name}"]
            for name in self._names(area, "")
            if not name.endswith((_WEIGHTS, _ARROW))
        }

    @property
    def names(self) -> set[str]:
        """The names of all its files."""
        return self.weights | self.others.keys()

    def whole(self, name: str) -> File | None:
        """Return the object that is a file of weights."""
        return self.files.get(f"{SERVING}/{name}")

    def delta(self, name: str) -> File | None:
        """Return the object that makes a file of weights from the parent's."""
        return self.files.get(f"{DELTA}/{name}{_ARROW}")

    def parent(self) -> "ServingCopy | None":
        """Return the copy of the policy from which this one was trained."""
        parents = (version_of(parent) for parent in self.manifest.parent_names)
        policy = next((parent for parent in parents if isinstance(parent, PolicyVersion)), None)
        return replace(self, manifest=read(self.store, policy)) if policy else None

    def fetch(self, file: File) -> Path:
        """Return a local copy of an object, checked."""
        self.fetching(self.store, [file], self.cache)
        return local_path(self.store, file, self.cache)

    def _names(self, area: str, ending: str) -> Iterator[str]:
        for name in self.files:
            if name.startswith(f"{area}/") and name.endswith(ending):
                yield name.removeprefix(f"{area}/").removesuffix(ending)


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
        elif not _add_delta(draft, path, name, parent, whole_every) or whole:
            draft.add(path, f"{SERVING}/{name}")
        else:
            kept = parent.cache / draft.version / draft.nonce / SERVING / name
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, kept)


def _add_delta(draft: Draft, path: Path, name: str, parent: ServingCopy, whole_every: int) -> bool:
    """Add what changed in a file of weights; return False if no delta is wanted, or the parent's is not to be had."""
    base = fetch_weights(parent, name) if whole_every > 1 and name in parent.weights else None
    if base is None:
        return False
    delta = path.with_name(path.name + _ARROW)
    write_delta(base, path, delta)
    if delta.stat().st_size > path.stat().st_size:  # a large step changed most numbers
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
    """Copy a file; other processes see all of it or nothing."""
    if source != target:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.part")
        shutil.copyfile(source, partial)
        partial.replace(target)


def fetch_weights(copy: ServingCopy, name: str) -> Path | None:
    """Return a local file of a copy's weights, checked; None if that of `model/` is less to fetch, or all there is.

    Raises:
        DamagedError: the file is stored whole, but is missing or damaged.
    """
    whole = copy.whole(name)
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
        if not result_of(copy.fetch(delta)).is_in(target):
            return _make(copy, name, target)
        touch(target)
        return target


def _make(copy: ServingCopy, name: str, target: Path) -> Path | None:
    steps = _steps(copy, name)
    if steps is None:
        return None
    base, deltas = steps
    path = copy.fetch(base) if isinstance(base, File) else base
    try:
        apply_deltas(path, [copy.fetch(each) for each in deltas], target)
    except DamagedError:
        if isinstance(base, Path):
            base.unlink(missing_ok=True)
        raise
    return target


def _steps(copy: ServingCopy, name: str) -> tuple[Path | File, list[File]] | None:
    """Return the nearest file from which deltas lead to a file of weights, and these, the first one first."""
    deltas: list[File] = []
    model = copy.files.get(f"model/{name}")
    while (delta := copy.delta(name)) and (parent := copy.parent()):
        deltas.insert(0, delta)
        if model and sum(each.bytes for each in deltas) > model.bytes:
            break
        if (near := parent.folder / name).is_file():
            return near, deltas
        if whole := parent.whole(name):
            return whole, deltas
        copy = parent
    return None


_NUMBERS = 2**20
"""Numbers in a record batch: the unit of compression, and of work for a thread."""
_THREADS = 8
_COLUMNS = ("low", "high")
Words = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Result:
    """The file that a delta makes.

    Example: Result(bytes=1_543_294_128, sha256="9a…")
    """

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Self:
        return cls(path.stat().st_size, sha256(path))

    def is_in(self, path: Path) -> bool:
        """Return whether a local file is this one."""
        return path.is_file() and path.stat().st_size == self.bytes and sha256(path) == self.sha256


def write_delta(base: Path, new: Path, delta: Path) -> None:
    """Write what makes the file `new` from the file `base`."""
    made = Result.of(new)
    notes: dict[bytes | str, bytes | str] = {"bytes": str(made.bytes), "sha256": made.sha256}
    schema = pa.schema([pa.field(name, pa.uint8(), nullable=False) for name in _COLUMNS], notes)
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", 1))
    before, after = _words(base), _words(new)
    with pa.OSFile(str(delta), "wb") as file, pa.ipc.new_file(file, schema, options=options) as writer:
        for start in range(0, len(after), _NUMBERS):
            change = after[start : start + _NUMBERS] ^ _part(before, start, len(after))
            columns = [pa.array(change.astype(np.uint8)), pa.array((change >> 8).astype(np.uint8))]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))


def result_of(delta: Path) -> Result:
    """Return what a delta makes, without reading its numbers.

    Raises:
        DamagedError: the file is no delta.
    """
    with _opened(delta) as reader:
        notes = reader.schema.metadata or {}
        try:
            return Result(int(notes[b"bytes"]), notes[b"sha256"].decode())
        except (KeyError, ValueError) as error:
            raise DamagedError(f"{delta} is no delta: it does not say what it makes ({error!r})") from error


def apply_deltas(base: Path, deltas: Sequence[Path], target: Path) -> None:
    """Make a file from `base` with one delta after the other, and prove it by its hash.

    Raises:
        DamagedError: a file is no delta, or the result is not the file that the last delta names, because `base` is not
            the file for which the first delta was written.
    """
    wanted, digest = result_of(deltas[-1]), hashlib.sha256()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with partial.open("wb") as file, contextlib.ExitStack() as stack:
            readers = [stack.enter_context(_opened(delta)) for delta in deltas]
            for part in _applied(_words(base), readers, wanted):
                file.write(part)
                digest.update(part)
        if (partial.stat().st_size, digest.hexdigest()) != (wanted.bytes, wanted.sha256):
            raise DamagedError(f"{deltas[-1]} makes another file than it says from {base}: one of the two is damaged")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _applied(base: Words, readers: Sequence[pa.ipc.RecordBatchFileReader], wanted: Result) -> Iterator[memoryview]:
    """Yield the bytes of the result, part by part."""
    total = -(-wanted.bytes // 2)

    def part(number: int) -> memoryview:
        words = _part(base, number * _NUMBERS, total).copy()
        for reader in readers:
            change = _change(reader, number)[: len(words)]
            words[: len(change)] ^= change
        return words.data.cast("B")[: wanted.bytes - 2 * number * _NUMBERS]

    numbers = range(-(-total // _NUMBERS))
    with ThreadPoolExecutor(_THREADS) as threads:
        for first in numbers[::_THREADS]:  # not all at once: they would all be in memory
            yield from threads.map(part, numbers[first : first + _THREADS])


def _change(reader: pa.ipc.RecordBatchFileReader, number: int) -> Words:
    if number >= reader.num_record_batches:
        return np.zeros(0, np.uint16)
    try:
        batch = reader.get_batch(number)
        batch.validate(full=True)
        low, high = (column.to_numpy() for column in batch.columns)
    except (pa.ArrowException, OSError) as error:
        raise DamagedError(f"a delta cannot be read: {error}") from error
    change: Words = high.astype(np.uint16)
    change <<= 8
    change |= low
    return change


def _words(path: Path) -> Words:
    """Map a file as 16-bit numbers; a last odd byte gets a zero."""
    size = path.stat().st_size
    if size % 2 == 0:
        return np.memmap(path, "<u2", mode="r") if size else np.zeros(0, "<u2")
    return np.frombuffer(path.read_bytes() + b"\0", "<u2")


def _part(words: Words, start: int, total: int) -> Words:
    """Return the part that begins at `start`, of a file that has `total` numbers; zeros stand for those it lacks."""
    part = words[start : min(start + _NUMBERS, total)]
    lacking = min(_NUMBERS, total - start) - len(part)
    return np.pad(part, (0, lacking)) if lacking else part


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
