"""How much is tried: a sample in `make test`, all of it in `make soak`."""

import os

SOAK = os.environ.get("SOAK") == "1"


def scaled(sample: int, all_of_it: int) -> int:
    return all_of_it if SOAK else sample
