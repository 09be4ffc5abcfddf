"""Deltas: what changes a file of bfloat16 weights into its successor's, in a few per cent of the bytes.

A small update leaves most bfloat16 numbers as they are, and changes the low bits of the others. So the XOR of both
files is mostly zeros. Its low and its high bytes are the two columns of an Arrow file, compressed with zstd.
"""

import contextlib
import hashlib
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage.errors import DamagedError
from storage.objects.store import sha256

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
