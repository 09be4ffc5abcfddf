"""How OpenMP's threads wait for work, in the process of a flow and in the servers that it starts."""

import os

_SPINS = "1000"
"""Turns for which a thread looks for work before it sleeps: about 10 microseconds, the time between two operations of
an update. On two cores an update alone is 1.5 times as fast as without; two updates at once take 1.25 times as long.
With 10,000 they take four times as long."""


def share_cores() -> None:
    """Set how threads wait, unless the environment says otherwise. Call it before anything imports torch.

    By default OpenMP's threads spin for so long that trainer and servers on the same cores become ten times slower.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)  # stronger than the policy, where GNU's OpenMP is used
