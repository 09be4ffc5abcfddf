"""Sums of weights are the same for files and servers; on a CPU each row gets the product of its own adapter."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors.numpy import save_file

from tasks.inference.weight_sums import _bits, _sum, differing, keys, merged, sums_of_folder, total

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
weights = arrays(np.float32, array_shapes(min_dims=2, max_dims=2, min_side=2, max_side=6), elements=finite)


@given(weights)
def test_numbers_are_rounded_as_a_server_rounds_them(weight: np.ndarray) -> None:
    for dtype, form in (("bfloat16", torch.bfloat16), ("float16", torch.float16), ("float32", torch.float32)):
        rounded = torch.from_numpy(weight).to(form)
        expected = rounded.view(torch.int32 if form is torch.float32 else torch.int16).long()
        assert (_bits(weight, dtype) == expected.numpy()).all()


@given(weights, st.data())
def test_parts_of_a_weight_have_its_sum(weight: np.ndarray, data: st.DataObject) -> None:
    """Rows of a fused weight in any order, columns of a row-parallel one, and padding."""
    whole, size = _sum("w", weight, "bfloat16"), 2**64
    cut = data.draw(st.integers(0, len(weight)))
    order = data.draw(st.permutations(range(len(weight))))
    assert (_sum("w", weight[:cut], "bfloat16") + _sum("w", weight[cut:], "bfloat16")) % size == whole
    assert _sum("w", np.concatenate([weight[order], np.zeros_like(weight)]), "bfloat16") == whole
    columns = weight.shape[1]
    column = data.draw(st.integers(1, columns - 1))
    left, right = np.ascontiguousarray(weight[:, :column]), np.ascontiguousarray(weight[:, column:])
    parts = [(left, keys("w", column)), (right, keys("w", columns - column, first=column))]
    assert sum(total(*part, lambda rows: _bits(rows, "bfloat16"), 4) for part in parts) % size == whole
    experts = "m.experts.0.w"
    assert _sum(experts, np.ascontiguousarray(weight.T), "float16") == _sum(experts, weight, "float16")


@given(weights, st.data())
def test_a_number_that_differs_changes_the_sum(weight: np.ndarray, data: st.DataObject) -> None:
    """By the least step in either direction, or in exchange with another number of its row."""
    place = tuple(data.draw(st.integers(0, side - 1)) for side in weight.shape)
    step = data.draw(st.sampled_from([np.inf, -np.inf]))
    other = weight.copy()
    with np.errstate(over="ignore"):
        other[place] = np.nextafter(weight[place], np.float32(step))
    assert _sum("w", other, "float32") != _sum("w", weight, "float32")
    turned = np.roll(weight, 1, axis=1)
    if (np.sort(turned.view(np.uint32), axis=0) != np.sort(weight.view(np.uint32), axis=0)).any():  # 0 is not -0
        assert _sum("w", turned, "float32") != _sum("w", weight, "float32")


def test_a_file_has_a_sum_for_each_weight(tmp_path: Path) -> None:
    """The numbers of a bias are below each other, those of a norm beside each other. Large weights are no exception."""
    norm, large = np.array([1, 2, 3], np.float32), np.random.default_rng(0).normal(size=(300, 500)).astype(np.float32)
    save_file({"norm.weight": norm, "q.bias": norm, "q.weight": large}, tmp_path / "model.safetensors")
    sums = sums_of_folder(tmp_path, "bfloat16")
    assert sums["q.bias"] == _sum("q.bias", norm[::-1].copy(), "bfloat16")
    assert sums["norm.weight"] != _sum("norm.weight", norm[::-1].copy(), "bfloat16")
    halves = (large[:123], large[123:])
    assert sums["q.weight"] == sum(_sum("q.weight", half, "bfloat16") for half in halves) % 2**64


@pytest.mark.parametrize(
    ("ranks", "layers"),
    [
        ([{"a.1.qkv": (9, False), "norm": (5, False)}], []),
        ([{"a.1.qkv": (4, True), "norm": (5, False)}, {"a.1.qkv": (5, True), "norm": (5, False)}], []),
        ([{"a.1.qkv": (2**64 - 1, True), "norm": (5, False)}, {"a.1.qkv": (10, True)}], []),
        ([{"a.1.qkv": (4, True), "norm": (5, False)}, {"a.1.qkv": (4, True), "norm": (5, False)}], ["layer 1"]),
        ([{"a.1.qkv": (9, False), "norm": (5, False)}, {"norm": (6, False)}], ["embedding, last norm or output layer"]),
        ([{"norm": (5, False)}], ["layer 1"]),
    ],
)
def test_sums_of_ranks_are_compared_by_layer(ranks: list[dict[str, tuple[int, bool]]], layers: list[str]) -> None:
    """Parts are added; a copy counts once, unless it differs from the others; what is missing differs."""
    assert differing(merged(ranks), {"b.1.q": 3, "b.1.k": 2, "b.1.v": 4, "norm": 5}) == layers


@pytest.mark.long  # imports vLLM into the process of the tests
@given(slots=st.lists(st.integers(-1, 2), min_size=1, max_size=8), seed=st.integers(0, 9))
def test_rows_get_the_product_of_their_adapter(slots: list[int], seed: int) -> None:
    from tasks.inference.worker import add_lora_linear

    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(len(slots), 6, generator=draw), torch.randn(len(slots), 9, generator=draw)
    a = tuple(torch.randn(3, 1, 2, 6, generator=draw) for _ in range(2))
    b = tuple(torch.randn(3, 1, width, 2, generator=draw) for width in (5, 4))
    wrapper: Any = SimpleNamespace(token_lora_indices=torch.tensor(slots))
    found = y.clone()
    add_lora_linear(wrapper, found, x, a, b, 0.5, (5, 4))
    for row, slot in enumerate(slots):
        parts = [0.5 * x[row] @ one[slot, 0].t() @ other[slot, 0].t() for one, other in zip(a, b, strict=True)]
        expected = y[row] + (torch.cat(parts) if slot >= 0 else 0)
        torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=1e-5)
