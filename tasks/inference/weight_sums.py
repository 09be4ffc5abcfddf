"""Sums that show whether a server holds exactly the weights of a checkpoint, in whatever form.

A server rounds weights to its number format, fuses them (`qkv_proj` is `q_proj`, `k_proj` and `v_proj` below each
other), divides them among GPUs and pads them with zeros. So no checksum of a file is one of a server. But a sum over
all numbers is the same for a whole and for its parts. Of a weight with rows i and columns j, it is

    sum over i, j of b (b + c) * key(j)   modulo 2^64,   b: the bits of w[i, j], signed, c: an odd constant,

where keys are odd. It differs if any number differs: b (b + c) is another for every b of up to 33 bits, and 0 for 0. It
is not linear, so small differences of opposite sign do not cancel. The order of the rows does not count, and neither
does the order of the columns among experts, which servers store transposed.
"""

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Sums = dict[str, tuple[int, bool]]
"""Sums of what one rank of a server holds, by the weights' names, and whether each is of a part of the weight."""
_FACTORS = (-7046029254386353131, -4658895280553007687)
"""Odd numbers of 64 bits, without a pattern in them: of keys."""
_ADDED = 6364136223846793005
"""The odd constant that is added to bits."""
UNTOLD = (
    "does not tell its weights. Start it with --worker-extension-cls tasks.inference.worker.PolicyWorker and this "
    "project in its PYTHONPATH"
)
"""The end of an error about a server without sums."""
CHUNK = 2**15
"""Numbers of which a sum is computed at a time, since they fit a core's cache."""


def keys(name: str, columns: int, first: int = 0) -> Integers:
    """Return the keys of the columns from `first` on, of a weight of this name: all 1 among experts."""
    if ".experts." in name:
        return np.ones(columns, np.int64)
    found = np.arange(first + 1, first + columns + 1)
    for factor, shift in zip(_FACTORS, (32, 29), strict=True):
        found *= factor  # modulo 2^64
        found ^= found >> shift
    return found | 1


def width(name: str, shape: Sequence[int]) -> int:
    """Return the number of columns of a weight; the numbers of a bias are below each other, as rows are."""
    return 1 if not shape or name.endswith("bias") else shape[-1]


def total(rows: Any, factors: Any, bits: Callable[[Any], Any], chunk: int) -> int:
    """Return the sum of a weight: of its rows, with a key for each column, a `chunk` of numbers at a time.

    `bits` returns those of some rows as int64: an array of NumPy or a tensor of torch.
    """
    step, of_columns = max(1, chunk // len(factors)), 0 * factors
    for start in range(0, len(rows), step):
        found = bits(rows[start : start + step])
        of_columns += (found * (found + _ADDED)).sum(0)
    return int((of_columns * factors).sum()) % 2**64


def sums_of_folder(model: Path, dtype: str) -> dict[str, int]:
    """Return the sum of each weight of a transformers folder, rounded to `dtype`."""
    sums = dict[str, int]()
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # NumPy lets other threads run while it computes
        for path in model.glob("*.safetensors"):
            weights = _mapped(path)
            found = threads.map(
                lambda name, weights=weights: _sum(name, weights[name][0], dtype, weights[name][1]), weights
            )
            sums |= zip(weights, found, strict=True)
    return sums


_STORED: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


def _mapped(path: Path) -> dict[str, tuple[NDArray[Any], str]]:
    """Return the weights in a safetensors file, as views of it, with their formats; NumPy has no bfloat16.

    The file begins with the length of its header, 8 bytes, and the header, JSON.
    """
    with path.open("rb") as file:
        start = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start))
    header.pop("__metadata__", None)
    if others := {info["dtype"] for info in header.values()} - set(_STORED):
        raise ValueError(f"{path} has weights in {', '.join(sorted(others))}: give float32, bfloat16 or float16")
    data = np.memmap(path, np.uint8, "r", 8 + start)
    return {
        name: (data[slice(*info["data_offsets"])].view(_STORED[info["dtype"]]).reshape(info["shape"]), info["dtype"])
        for name, info in header.items()
    }


def _sum(name: str, weight: NDArray[Any], dtype: str, stored: str = "F32") -> int:
    columns = width(name, weight.shape)

    def bits(part: NDArray[Any]) -> Integers:
        if stored == "BF16":
            part = (part.astype(np.uint32) << 16).view(np.float32)
        return _bits(part.astype(np.float32, copy=False), dtype)

    return total(weight.reshape(-1, columns), keys(name, columns), bits, CHUNK)


def _bits(values: NDArray[np.float32], dtype: str) -> Integers:
    """Return the bits of finite numbers after rounding, half to even, as torch does."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.int16).astype(np.int64)
    if dtype == "float32":
        return values.view(np.int32).astype(np.int64)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return rounded.astype(np.uint16).view(np.int16).astype(np.int64)


def merged(ranks: Sequence[Sums]) -> dict[str, int]:
    """Return the sum of each weight of a server from those of its ranks.

    Copies of a weight count once if they are equal. A different copy counts, too, and makes the sum a wrong one.
    """
    sums, copies = Counter[str](), set[tuple[str, int]]()
    for name, (value, is_part) in itertools.chain.from_iterable(rank.items() for rank in ranks):
        if is_part or (name, value) not in copies:
            sums[name] += value
        copies.add((name, value))
    return dict(sums)


def differing(held: Mapping[str, int], expected: Mapping[str, int]) -> list[str]:
    """Return the layers in which a server holds other weights than expected; empty if there are none.

    Servers name weights differently, but the number of a layer is in all names.
    """
    sums = Counter[str]()
    for sign, weights in ((1, held), (-1, expected)):
        for name, value in weights.items():
            layer = re.search(r"\.(\d+)\.", name)
            sums[f"layer {layer[1]}" if layer else "embedding, last norm or output layer"] += sign * value
    return [layer for layer, value in sums.items() if value % 2**64]
