"""Proof that a server serves the weights of a checkpoint, and not those that it served before.

A canary (`storage.versions.checkpoints.Canary`) tells weights apart by their logprobs. In half precision a server's
logprobs err by more than one update changes them: there the server's own checksums show that the weights were replaced.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from storage.versions.checkpoints import Checkpoint
from tasks.inference.api import InferenceError
from tasks.inference.client import Client

logger = logging.getLogger(__name__)

_CLEAR = 3.0
"""Two versions can be told apart whose logprobs differ by so many times a server's error."""
_NEARER = 0.75
"""Of the distance to the version before, the distance to the one asked for may be this share at most."""


@dataclass(frozen=True, slots=True)
class Proven:
    """What a server was last proven to serve.

    Example: Proven(policy=…, error=0.015, checksums={"dp0:pp0:pcp0:tp0:model.norm.weight": "9f3a…"})
    """

    policy: Checkpoint
    error: float  # mean absolute difference between its logprobs and the checkpoint's, in nats
    checksums: dict[str, str] | None = None  # of its parameters, where they were asked for


class Proof:
    """Proves one swap: `prepare` comes before it, `demand` after it.

    Args:
        client: of the server.
        policy: the checkpoint that is to be served.
        before: what the server was proven to serve until then; None where nothing is known.
        tolerance: largest mean difference between served and own logprobs, in nats.
    """

    def __init__(self, client: Client, policy: Checkpoint, before: Proven | None, tolerance: float) -> None:
        self._client, self._policy, self._tolerance = client, policy, tolerance
        self._before = before if before and _can_differ(before.policy, policy) else None
        self._old: dict[str, str] | None = None

    def _by_checksums(self, before: Proven) -> bool:
        """Whether the two versions are too alike for the canary."""
        step = _distance(before.policy.canary.logprobs, self._policy.canary.logprobs)
        return step < _CLEAR * before.error

    async def prepare(self) -> None:
        """Note what the server holds, where the canary will not show that it was replaced."""
        if self._before and self._by_checksums(self._before):
            self._old = self._before.checksums or await self._client.weight_checksums()

    async def demand(self) -> Proven:
        """What is proven of the server now.

        Raises:
            InferenceError: it serves something else, or may still serve what it served before.
        """
        policy, client = self._policy, self._client
        label = await client.weight_version()
        if label != str(policy.number):
            raise InferenceError(f"{client.url} serves weight version {label}, asked for {policy.number}")
        served = await client.prompt_logprobs(policy.canary.token_ids)
        error = _distance(served, policy.canary.logprobs)
        if not error <= self._tolerance:  # also NaN
            raise InferenceError(self._too_far(served, error))
        if self._old is not None:
            return Proven(policy, error, await self._demand_other_weights())
        if self._before and error > _NEARER * (other := _distance(served, self._before.policy.canary.logprobs)):
            raise InferenceError(
                f"{client.url} does not serve {policy.version}: its logprobs of the canary differ by {error:.3g} from "
                f"those of this version and by {other:.3g} from those of {self._before.policy.version}, which it "
                "served before: the new weights were not loaded. Try inference.swap=restart"
            )
        return Proven(policy, error)

    async def _demand_other_weights(self) -> dict[str, str]:
        """The server's checksums, of which some must have changed."""
        assert self._before
        client, before, now = self._client, self._before.policy.version, self._policy.version
        new = await client.weight_checksums()
        if new == self._old:
            raise InferenceError(
                f"{client.url} does not serve {now}: not one of its parameters has changed since {before}. The new "
                "weights were not loaded; or the update was so small that inference.dtype rounds it away: then a "
                "larger optimizer.lr, or float32, is needed"
            )
        logger.info("%s: the canary cannot tell %s from %s; the server's checksums can", client.url, now, before)
        return new

    def _too_far(self, served: Sequence[float], error: float) -> str:
        expected = self._policy.canary.logprobs[: len(served)]
        return (
            f"{self._client.url} does not serve {self._policy.version}: its logprobs of the canary differ by "
            f"{error:.3g} on average (sum {sum(served):.6f} served, {sum(expected):.6f} expected), more than "
            f"inference.canary_tolerance={self._tolerance:g}. Tied embeddings are not reloaded "
            "in place on a CPU: try inference.swap=restart; for half precision raise the tolerance"
        )


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Mean absolute difference over the tokens that both have."""
    pairs = list(zip(one, other, strict=False))
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


def _can_differ(before: Checkpoint, policy: Checkpoint) -> bool:
    """Whether the two have other weights, and logprobs of the same tokens."""
    pairs = zip(before.canary.token_ids, policy.canary.token_ids, strict=False)
    return _weights(before) != _weights(policy) and all(one == other for one, other in pairs)


def _weights(policy: Checkpoint) -> dict[str, str]:
    """Hashes of the model's weight files by name."""
    files = {file.name: file.sha256 for file in policy.manifest.files if file.name.startswith("model/")}
    return {name: sha256 for name, sha256 in files.items() if name.endswith(".safetensors")}
