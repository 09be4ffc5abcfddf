"""Numbered logs, the seals of their entries, and the catalog, which is one of these logs."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import StorageError
from storage.logs.log import Log, first_free
from storage.objects.seal import seal, unseal
from storage.objects.store import Store

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, min_size=1))
def test_sealed_values_are_read_back(values: dict[str, object]) -> None:
    """Every JSON object is read back unchanged."""
    assert unseal(seal(values), "here") == values


@given(st.dictionaries(st.text(max_size=5), JSON, min_size=1, max_size=3), st.data())
def test_a_seal_finds_any_flipped_bit(values: dict[str, object], data: st.DataObject) -> None:
    """The change of any bit in a sealed object raises an error."""
    sealed = bytearray(seal(values))
    bit = data.draw(st.integers(0, len(sealed) * 8 - 1))
    sealed[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(StorageError, match="here"):
        unseal(bytes(sealed), "here")


@given(st.integers(0, 20_000), st.integers(0, 20_000))
def test_the_end_is_found_in_few_requests(length: int, known: int) -> None:
    """The search takes growing steps from the known length, then halves; 10,000 entries need 22 requests at most."""
    requests = []

    def has(number: int) -> bool:
        requests.append(number)
        return number < length

    known = min(known, length)
    assert first_free(has, known) == length
    assert len(requests) <= 1 + (0 if length == known else 1.6 * (length - known).bit_length() + 2)


@pytest.mark.parametrize("body", [b'{\n "a": \n}', b"{" + b'"a": [' * 100_000 + b"\n}", b'{\n "a": "\xff"\n}'])
def test_invalid_json_with_a_right_digest_is_damage(store: Store, body: bytes) -> None:
    """Reading an entry that is not JSON raises the error for damage, though its digest is right."""
    digest = hashlib.sha256(body).hexdigest()
    store.write("some/log/00000000.json", body[:-2] + f',\n "digest": "{digest}"\n}}\n'.encode())
    with pytest.raises(StorageError, match="00000000.json is not JSON, though its digest is right"):
        Log(store, "some/log").read(0)
