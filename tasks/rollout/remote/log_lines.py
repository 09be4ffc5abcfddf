"""The lines that the log gets from time to time about the workers of a rollout."""

import time
from collections import Counter
from collections.abc import Iterable

from tasks.rollout.remote.shared_rollout import Attended, SharedRollout

_TOLD_APART = 16
"""More workers than these are summed up in one line."""


def log_lines(rollout: SharedRollout) -> list[str]:
    """Say what each worker does, or what all do together if they are many."""
    if not rollout.parts:
        return []
    if len(rollout.parts) > _TOLD_APART:
        return [_summary(rollout)]
    return [_line(worker, len(part.playing)) for worker, part in rollout.parts.items()]


def _line(worker: Attended, playing: int) -> str:
    policy = worker.policy.number if worker.policy else "none yet"
    return f"{worker.remote.name}: {_done([worker])}, {playing} groups playing, policy {policy}, {_heard(worker)}"


def _summary(rollout: SharedRollout) -> str:
    workers = rollout.parts.keys()
    playing = sum(len(part.playing) for part in rollout.parts.values())
    policies = Counter(worker.policy.number if worker.policy else "none yet" for worker in workers)
    serving = ", ".join(f"policy {policy} on {count}" for policy, count in policies.items())
    quiet = min(workers, key=lambda worker: worker.heard)
    return (
        f"{len(workers)} workers: {_done(workers)}, {playing} groups playing, {serving}; "
        f"{quiet.remote.name} is the quietest, {_heard(quiet)}"
    )


def _done(workers: Iterable[Attended]) -> str:
    counts = [(worker.episodes, worker.tokens) for worker in workers]
    return f"{sum(episodes for episodes, _ in counts)} episodes, {sum(tokens for _, tokens in counts)} tokens"


def _heard(worker: Attended) -> str:
    return f"heard {time.monotonic() - worker.heard:.0f} s ago"
