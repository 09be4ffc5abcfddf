"""The extent of long tests: a sample, or everything with the environment variable SOAK=1."""

import os
from typing import TypeVar

T = TypeVar("T")
SOAK = os.environ.get("SOAK") == "1"


def scaled(sample: T, all_of_it: T) -> T:
    return all_of_it if SOAK else sample
