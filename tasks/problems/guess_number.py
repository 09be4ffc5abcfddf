"""Games for the environment `guess-number`: the prompt has the range, the seed decides the number."""

import json
from itertools import count, islice

from configs.problems import GuessSource
from storage.records import Problem
from tasks.problems.problem_set import SEED


def generate(source: GuessSource) -> list[Problem]:
    """Generate the first games of the split. Every fourth seed is held out.

    >>> generate(GuessSource(kind="guess-number", count=1))[0].metadata
    '{"seed": 1, "low": 1, "high": 7}'
    """
    held_out = source.split == "held-out"
    seeds = islice((seed for seed in count(1) if (seed % 4 == 0) == held_out), source.count)
    return [
        Problem(
            f"game{seed}",
            f"Guess the number from {source.low} to {source.high}.",
            [],
            "guess-number",
            json.dumps({SEED: seed, "low": source.low, "high": source.high}),
        )
        for seed in seeds
    ]
