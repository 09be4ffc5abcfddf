"""The proof that a server serves the weights of a checkpoint, and not those that it served before.

The logprobs of a canary (`storage.versions.checkpoints.Canary`) distinguish weights. In half precision, a server's
logprobs have an error larger than the change by one update: then the server's own checksums show the replacement.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from storage.versions.checkpoints import Checkpoint
from tasks.inference.adapters import name_of
from tasks.inference.api import InferenceError
from tasks.inference.client import Client

logger = logging.getLogger(__name__)

_CLEAR = 3.0
"""The canary distinguishes two versions if their logprobs differ by at least so many times a server's error."""
_NEARER = 0.75
"""Largest ratio of two distances of the served logprobs: to the requested version, and to the version before."""


@dataclass(frozen=True, slots=True)
class Proven:
    """The last proof of what a server serves.

    Example: Proven(policy=…, error=0.015, checksums={"dp0:pp0:pcp0:tp0:model.norm.weight": "9f3a…"})
    """

    policy: Checkpoint
    error: float  # mean absolute difference between its logprobs and the checkpoint's, in nats
    checksums: dict[str, str] | None = None  # of its parameters; None if the canary was enough


class Proof:
    """The proof of one swap: call `prepare` before it and `demand` after it.

    Args:
        client: the server's client.
        policy: the checkpoint that the server should serve.
        before: what the server was proven to serve before the swap; None if unknown.
        tolerance: largest mean difference between the served logprobs and the checkpoint's, in nats.
    """

    def __init__(self, client: Client, policy: Checkpoint, before: Proven | None, tolerance: float) -> None:
        self._client, self._policy, self._tolerance = client, policy, tolerance
        self._before = before if before and _can_differ(before.policy, policy) else None
        self._old: dict[str, str] | None = None

    async def prepare(self) -> None:
        """Note the server's checksums, if the two versions are too similar for the canary."""
        if before := self._before:
            step = _distance(before.policy.canary.logprobs, self._policy.canary.logprobs)
            if step < _CLEAR * before.error:
                self._old = before.checksums or await self._held(before.policy)

    async def _held(self, policy: Checkpoint) -> dict[str, str]:
        """Return what the swap must change on the server: its checksums or, if only the adapter changes, the canary."""
        if self._before and policy.adapter and self._before.policy.model == self._policy.model:
            return {"adapter": str(await self._client.prompt_logprobs(policy.canary.token_ids, name_of(policy)))}
        return await self._client.weight_checksums()

    async def demand(self) -> Proven:
        """Return the proof that the server serves the policy.

        Raises:
            InferenceError: it serves other weights, or may still serve those before the swap.
        """
        policy, client = self._policy, self._client
        asked = client.prompt_logprobs(policy.canary.token_ids, name_of(policy))
        label, served = await asyncio.gather(client.weight_version(), asked)
        if label != str(policy.base_number):
            raise InferenceError(f"{client.url} serves weight version {label}, asked for {policy.base_number}")
        expected = policy.canary.logprobs
        error = _distance(served, expected)
        if not error <= self._tolerance:  # also NaN
            raise InferenceError(
                f"{client.url} does not serve {policy.version}: its logprobs of the canary differ by {error:.3g} on "
                f"average (sum {sum(served):.6f} served, {sum(expected[: len(served)]):.6f} expected), more than "
                f"inference.canary_tolerance={self._tolerance:g}. On a CPU, tied embeddings are not reloaded in place: "
                "try inference.swap=restart. For half precision, raise the tolerance"
            )
        if (before := self._before) is None:
            return Proven(policy, error)
        if self._old is not None:
            new = await self._held(policy)
            if new == self._old:
                raise InferenceError(
                    f"{client.url} does not serve {policy.version}: none of its parameters has changed since "
                    f"{before.policy.version}. Either the new weights were not loaded, or the update was so small that "
                    "inference.dtype rounds it away: then raise optimizer.lr or use float32"
                )
            logger.info("%s: checksums distinguish %s, the canary does not", client.url, policy.version)
            return Proven(policy, error, None if policy.adapter else new)
        if error > _NEARER * (other := _distance(served, before.policy.canary.logprobs)):
            raise InferenceError(
                f"{client.url} does not serve {policy.version}: its logprobs of the canary differ by {error:.3g} from "
                f"this version's and by {other:.3g} from those of {before.policy.version}, which it served before: the "
                "new weights were not loaded. Try inference.swap=restart"
            )
        return Proven(policy, error)


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the mean absolute difference over the tokens that both have."""
    pairs = list(zip(one, other, strict=False))
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


def _can_differ(before: Checkpoint, policy: Checkpoint) -> bool:
    """Return whether the two have different weights, and logprobs of the same tokens.

    Another number of ranks writes the same weights into other files; then equal canaries mean equal weights.
    """
    one, other = _weights(before), _weights(policy)
    if one == other or (one.keys() != other.keys() and before.canary == policy.canary):
        return False
    pairs = zip(before.canary.token_ids, policy.canary.token_ids, strict=False)
    return all(mine == theirs for mine, theirs in pairs)


def _weights(policy: Checkpoint) -> dict[str, str]:
    """Return the hashes of the weight files by name, of the model and of its adapter."""
    files = {file.name: file.sha256 for manifest in (policy.of_model, policy.manifest) for file in manifest.files}
    kept = "model/*.safetensors", "adapter/*.safetensors"
    return {name: digest for name, digest in files.items() if any(fnmatch(name, pattern) for pattern in kept)}
