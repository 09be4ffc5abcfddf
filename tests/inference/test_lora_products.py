"""On a CPU each row of a batch gets the product of its own adapter, and none where it has none."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.long  # imports vLLM into the process of the tests


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
