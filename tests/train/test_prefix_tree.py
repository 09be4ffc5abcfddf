"""Prefix trees hold every sequence, and every common beginning once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tasks.train.prefix_tree import find_tree

SEQUENCES = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=10)


@given(SEQUENCES)
def test_every_beginning_is_in_the_tree_once(sequences: list[list[int]]) -> None:
    """The paths lead through the sequences' tokens, and two paths share a token where their beginnings are equal."""
    tree = find_tree(map(np.array, sequences), most=1000)
    assert tree is not None
    assert [tree.tokens[path].tolist() for path in tree.paths] == sequences
    beginnings = {tuple(sequence[: end + 1]) for sequence in sequences for end in range(len(sequence))}
    assert len(tree.tokens) == len(beginnings)
    places = {
        (tuple(sequence[: end + 1]), path[end])
        for sequence, path in zip(sequences, tree.paths, strict=True)
        for end in range(len(sequence))
    }
    assert len(places) == len(beginnings)
    assert all((np.diff(path) > 0).all() for path in tree.paths)


@given(SEQUENCES, st.integers(0, 60))
def test_a_tree_that_is_too_large_is_none(sequences: list[list[int]], most: int) -> None:
    whole = find_tree(map(np.array, sequences), most=1000)
    assert whole is not None
    assert (find_tree(map(np.array, sequences), most) is None) == (len(whole.tokens) > most)
