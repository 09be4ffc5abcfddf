"""A delta makes exactly the file for which it was written, or says that it cannot."""

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import DamagedError
from storage.objects.store import has_content
from storage.versions import serving_copies
from storage.versions.serving_copies import apply_deltas, result_of, write_delta

FILES = st.integers(1, 20).flatmap(
    lambda numbers: st.lists(st.binary(min_size=2 * numbers, max_size=2 * numbers), min_size=2, max_size=4)
)


@given(contents=FILES, batch=st.integers(1, 8))
def test_one_after_the_other_they_make_the_last_file(contents: list[bytes], batch: int) -> None:
    with TemporaryDirectory() as name, patch.object(serving_copies, "_NUMBERS", batch):
        folder = Path(name)
        files = [folder / f"file-{number}" for number in range(len(contents))]
        for file, content in zip(files, contents, strict=True):
            file.write_bytes(content)
        steps = [folder / f"delta-{number}" for number in range(1, len(files))]
        for base, new, step in zip(files, files[1:], steps, strict=False):
            write_delta(base, new, step)
            assert has_content(new, *result_of(step))
        apply_deltas(files[0], steps, folder / "made")
        assert (folder / "made").read_bytes() == contents[-1]


def test_small_changes_are_small(tmp_path: Path) -> None:
    """One number in 50 changes in its last bit: a few per cent of the bytes are left, and random bytes stay as many."""
    rng = np.random.default_rng(0)
    before = (rng.normal(0, 0.02, 2**20).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    after = before ^ (rng.random(len(before)) < 0.02).astype(np.uint16)
    sizes = {}
    for name, content in (("changed", after), ("random", rng.integers(2**16, size=len(before), dtype=np.uint16))):
        before.tofile(tmp_path / "before")
        content.tofile(tmp_path / name)
        write_delta(tmp_path / "before", tmp_path / name, tmp_path / "delta")
        sizes[name] = (tmp_path / "delta").stat().st_size / (2 * len(before))
    entropy = -sum(p * math.log2(p) for p in (0.02, 0.98)) / 16
    assert entropy < sizes["changed"] < 2.5 * entropy
    assert 0.99 < sizes["random"] < 1.01


@pytest.mark.parametrize("other", [b"\1" * 3000, b"\0" * 2999, b""])
def test_another_base_is_noticed(tmp_path: Path, other: bytes) -> None:
    base, new, delta = (tmp_path / name for name in ("base", "new", "delta"))
    base.write_bytes(b"\0" * 2998 + b"\2\2")
    new.write_bytes(b"\3" * 3000)
    write_delta(base, new, delta)
    base.write_bytes(other)
    with pytest.raises(DamagedError, match="makes another file than it says"):
        apply_deltas(base, [delta], tmp_path / "made")
    assert {path.name for path in tmp_path.iterdir()} == {"base", "new", "delta"}


@given(data=st.data())
def test_a_damaged_delta_is_an_error_or_harmless(data: st.DataObject) -> None:
    """Whatever bytes are in it, it makes the right file, or DamagedError is raised, and nothing is left."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        base, new, delta = (folder / name for name in ("base", "new", "delta"))
        base.write_bytes(bytes(range(200)))
        new.write_bytes(bytes(reversed(range(200))))
        write_delta(base, new, delta)
        content = bytearray(delta.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
        delta.write_bytes(content[: data.draw(st.sampled_from([len(content), place]))])
        try:
            apply_deltas(base, [delta], folder / "made")
        except DamagedError:
            assert not (folder / "made").exists()
        else:
            assert has_content(folder / "made", *result_of(delta))


@pytest.mark.parametrize("content", [b"", b"ARROW1\0\0", b"PAR1" * 100])
def test_another_file_is_no_delta(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "delta").write_bytes(content)
    with pytest.raises(DamagedError, match="is no delta"):
        result_of(tmp_path / "delta")
