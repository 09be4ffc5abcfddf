"""Seeds, derived from the run's seed and from what each is used for: iteration, problem, sample, turn."""

import hashlib


def derive(*parts: int | str) -> int:
    """Return a 31-bit seed that depends on all `parts`, such as (run seed, iteration, problem, sample, turn)."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
