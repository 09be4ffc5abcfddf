"""The column `experts` of trajectories: which experts of a mixture the engine chose for each token.

Example of reading it: `numpy.load(io.BytesIO(row["experts"]))`
"""

import io

import numpy as np
import numpy.typing as npt

Experts = npt.NDArray[np.int16]
"""The numbers of the experts, [T, layers, experts per token]; -1: unknown, as that of the last token of a sequence."""


def pack(experts: Experts) -> bytes:
    """Return the value of the column, a file in NumPy's format .npy."""
    with io.BytesIO() as file:
        np.save(file, experts, allow_pickle=False)
        return file.getvalue()


def unpack(stored: bytes) -> Experts:
    """Read a value of the column.

    Raises:
        ValueError: it is not such a file, or has other numbers than those of experts.
    """
    try:
        read = np.lib.format.read_array(io.BytesIO(stored), allow_pickle=False)  # type: ignore[no-untyped-call]
    except (ValueError, MemoryError) as error:
        raise ValueError(f"experts are not a file in NumPy's format .npy: {error}") from None
    if read.ndim != 3:
        raise ValueError(f"experts of the shape {read.shape}, not [tokens, layers, experts per token]")
    if read.dtype.kind not in "iu" or (read.size and not -1 <= read.min() <= read.max() < 2**15):
        raise ValueError("experts that are no numbers from -1 (unknown) to 32767")  # in 16 bits they would be others
    experts: Experts = read.astype(np.int16)
    return experts
