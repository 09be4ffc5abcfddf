"""Prefix trees: tokens that several sequences have in common at their beginning are computed once.

The samples of a group have the same prompt, and often the same first words. A causal model computes the same states for
a token whenever the tokens before it are the same. So a group is one row of tokens, in which each token reads only the
tokens before it in its own sequence.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from tasks.train.samples import Ints


class PrefixTree(NamedTuple):
    """N tokens and the way of each sequence through them.

    Example of 5 6 7, 5 8 and 5 6: PrefixTree(tokens=[5, 6, 7, 8], paths=[[0, 1, 2], [0, 3], [0, 1]])
    """

    tokens: Ints  # N
    paths: list[Ints]  # for each sequence, the index in `tokens` of each of its tokens


def find_tree(sequences: Iterable[Ints], most: int) -> PrefixTree | None:
    """Return the prefix tree of sequences; None if it has more than `most` tokens."""
    nodes, paths = dict[tuple[int, int], int](), list[Ints]()  # (token before, token) -> token
    for sequence in sequences:
        node, path = -1, list[int]()
        for token in sequence.tolist():
            node = nodes.setdefault((node, token), len(nodes))
            path.append(node)
            if len(nodes) > most:
                return None
        paths.append(np.array(path))
    return PrefixTree(np.array([token for _, token in nodes]), paths)
