"""Numbered logs, their seals, and the catalog made of them."""

import hashlib
import threading
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import StorageError
from storage.logs import catalog
from storage.logs.log import Log, first_free
from storage.objects.seal import seal, unseal
from storage.objects.store import Store

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, min_size=1))
def test_a_seal_opens_to_what_was_sealed(values: dict[str, object]) -> None:
    """Whatever is stored comes back, whatever it looks like."""
    assert unseal(seal(values), "here") == values


@given(st.dictionaries(st.text(max_size=5), JSON, min_size=1, max_size=3), st.data())
def test_a_seal_finds_any_flipped_bit(values: dict[str, object], data: st.DataObject) -> None:
    """There is no bit in a sealed object whose change goes unseen."""
    sealed = bytearray(seal(values))
    bit = data.draw(st.integers(0, len(sealed) * 8 - 1))
    sealed[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(StorageError, match="here"):
        unseal(bytes(sealed), "here")


@given(st.integers(0, 20_000), st.integers(0, 20_000))
def test_the_end_is_found_in_few_looks(length: int, known: int) -> None:
    """By doubling and halving from what is known; 10,000 entries need 22 looks at most."""
    looks = []

    def has(number: int) -> bool:
        looks.append(number)
        return number < length

    known = min(known, length)
    assert first_free(has, known) == length
    assert len(looks) <= 1 + (0 if length == known else 1.6 * (length - known).bit_length() + 2)


def test_entries_are_numbered_and_stay(any_store: Store) -> None:
    """Appended entries are found by another reader, in order."""
    log = Log(any_store, "some/log")
    assert log.last() is None
    for number in range(5):
        assert log.append({"value": number}) == number
    other = Log(Store(any_store.root), "some/log")
    assert [other.read(number)["value"] for number in range(other.length())] == list(range(5))


def test_a_number_is_taken_once(any_store: Store) -> None:
    """Who is told that the number was free knows that nothing came between."""
    log = Log(any_store, "some/log")
    assert log.put(0, {"by": "first"})
    assert not log.put(0, {"by": "second"})
    found = log.last()
    assert found
    assert found[1]["by"] == "first"


def test_writers_at_the_same_time_lose_nothing(any_store: Store) -> None:
    """Eight appending threads: every entry stands once, without a gap."""

    def write(writer: int) -> None:
        log = Log(Store(any_store.root), "some/log")
        for item in range(4):
            log.append({"value": [writer, item]})

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log = Log(any_store, "some/log")
    values = [tuple(log.read(number)["value"]) for number in range(log.length())]
    assert sorted(values) == [(writer, item) for writer in range(8) for item in range(4)]


def test_the_newest_are_read_first(any_store: Store) -> None:
    """Looking at the end of the catalog does not read the rest."""
    for number in range(20):
        catalog.enter(any_store, f"runs/r/scores/{number:06d}/x", "scores", [], "nonce")
    newest = list(islice(catalog.newest_first(any_store), 3))
    assert newest == catalog.read_all(any_store)[:-4:-1]
    assert [entry.number for entry in catalog.read_all(any_store)] == list(range(20))


def test_a_damaged_entry_is_named(store: Store) -> None:
    """Not skipped, not misread."""
    log = Log(store, "some/log")
    log.append({"value": 1})
    store.write("some/log/00000000.json", store.read("some/log/00000000.json").replace(b"1", b"2", 1))
    with pytest.raises(StorageError, match="00000000.json does not match its own digest"):
        log.read(0)


@pytest.mark.parametrize("body", [b'{\n "a": \n}', b"{" + b'"a": [' * 100_000 + b"\n}", b'{\n "a": "\xff"\n}'])
def test_a_right_digest_of_nonsense_is_damage(store: Store, body: bytes) -> None:
    """Whoever wrote it, it is told like any other damage."""
    digest = hashlib.sha256(body).hexdigest()
    store.write("some/log/00000000.json", body[:-2] + f',\n "digest": "{digest}"\n}}\n'.encode())
    with pytest.raises(StorageError, match="00000000.json is not JSON, though its digest is right"):
        Log(store, "some/log").read(0)
