"""The proof that a server serves the weights of a checkpoint: all of them, and no other version's.

A server with the extension of `tasks.inference.worker` tells the sums of the weights that it holds. They must be those
of the checkpoint's files, rounded to the server's number format. This is exact, so half precision makes no difference.

The canary, a fixed sequence (`storage.versions.checkpoints.Canary`), shows that the server computes with what it holds:
its logprobs must be nearer to this version's than to those of the last version that differs clearly. Where sums cannot
be compared, since a server lacks the extension or holds weights in another form, the canary is the proof, and the
logprobs must be the trainer's within a tolerance.
"""

import logging
import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass

from storage.errors import first_few
from storage.versions.checkpoints import Checkpoint
from tasks.inference.api import InferenceError
from tasks.inference.client import Client
from tasks.inference.weight_sums import UNTOLD, differing

logger = logging.getLogger(__name__)

_CLEAR = 3.0
"""The canary distinguishes two versions if their logprobs differ by at least so many times a server's error."""
_NEARER = 0.75
"""Largest ratio of two distances of the served logprobs: to the requested version, and to an earlier one."""


@dataclass(frozen=True, slots=True)
class Proven:
    """The last proof of what a server serves.

    Example: Proven(policy=…, exact=True, clear=…, error=0.015)
    """

    policy: Checkpoint
    exact: bool  # by sums of all weights; otherwise by the canary alone
    clear: Checkpoint  # the newest version whose canary differed from the version before; at first the first version
    error: float  # mean absolute difference between the logprobs served for `clear` and its own, in nats


def adapter_name(policy: Checkpoint) -> str | None:
    """Return the name under which servers have a policy's adapter; None for a policy without one.

    Attempts to make the same version have different names.
    """
    return f"policy-{policy.number}-{policy.attempt}" if policy.adapter else None


def holds_base(before: Proven | None, policy: Checkpoint) -> bool:
    """Return whether a server has the weights of a policy already, and lacks only its adapter."""
    return bool(before and policy.adapter and before.policy.model == policy.model)


@dataclass(frozen=True, slots=True)
class Proof:
    """The proof of one swap."""

    client: Client
    policy: Checkpoint  # what the server should serve
    before: Proven | None  # what it was proven to serve before the swap; None if unknown
    tolerance: float | None  # largest mean difference of logprobs of the canary, in nats; None: any
    expected: Awaitable[Mapping[str, int]] | None  # sums of the weights in the server's format; None if it `holds_base`

    async def demand(self) -> Proven:
        """Return the proof that the server serves the policy.

        Raises:
            InferenceError: it serves other weights, or there is no proof that it does not.
        """
        policy, client, before = self.policy, self.client, self.before
        if (label := await client.weight_version()) != str(policy.base_number):
            raise InferenceError(f"{client.url} serves weight version {label}, asked for {policy.base_number}")
        exact = before.exact if before and holds_base(before, policy) else await self._compare_weights()
        served = await client.prompt_logprobs(policy.canary.token_ids, adapter_name(policy))
        expected = policy.canary.logprobs
        error, most = _distance(served, expected), self.tolerance or math.inf
        if not (math.isfinite(error) and error <= most):
            raise self._wrong(
                f"its logprobs of the canary differ by {error:.3g} on average (sum {sum(served):.6f} served, "
                f"{sum(expected[: len(served)]):.6f} expected), inference.canary_tolerance={self.tolerance}"
            )
        if before is None:
            logger.info("%s serves %s; its logprobs of the canary differ by %.3g", client.url, policy.version, error)
            return Proven(policy, exact, policy, error)
        clear = before.clear
        step = _distance(clear.canary.logprobs, expected)
        if step <= _CLEAR * before.error:
            return Proven(policy, exact, clear, before.error)
        if error > _NEARER * (other := _distance(served, clear.canary.logprobs)):
            earlier = f"by {other:.3g} from those of {clear.version}, which it served before"
            raise self._wrong(f"its logprobs of the canary differ by {error:.3g} from this version's and {earlier}")
        return Proven(policy, exact, policy, error)

    async def _compare_weights(self) -> bool:
        """Return whether the server holds the weights of the policy; False if the canary has to prove that alone."""
        sums, before = await self.client.weight_sums(), self.before
        if sums is None:
            if self.tolerance is None:
                raise self._unproven(f"it {UNTOLD}")
            return False
        assert self.expected is not None
        if not (wrong := differing(sums, await self.expected)):
            return True
        if before and before.exact:
            raise self._wrong(f"it holds other weights in {first_few(wrong)}")
        form = f"its weights in {first_few(wrong)} are not those of the files, or in another form"
        if self.tolerance is None:
            raise self._unproven(f"{form}. If its log names no error, the form is another")
        if before is None:
            logger.warning("%s: %s. The canary alone proves what it serves", self.client.url, form)
        return False

    def _wrong(self, problem: str) -> InferenceError:
        return InferenceError(f"{self.client.url} does not serve {self.policy.version}: {problem}. Its log may say why")

    def _unproven(self, problem: str) -> InferenceError:
        remedy = "Or set inference.canary_tolerance: then logprobs of the canary are the proof"
        return InferenceError(
            f"nothing proves that {self.client.url} serves {self.policy.version}: {problem}. {remedy}"
        )


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the mean absolute difference over the tokens that both have."""
    pairs = list(zip(one, other, strict=False))
    return sum(abs(a - b) for a, b in pairs) / len(pairs)
