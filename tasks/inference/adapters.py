"""The serving of a policy that is an adapter of another checkpoint's weights.

The server is started with the base, and loads the adapter of each policy version under a name of its own. Requests
name it, those in flight keep the former one to their end. So the name says which version sampled a token, and the
weight version that the server reports is that of the base. No request names the base alone: in a batch with requests
of adapters, vLLM's CPU backend would answer it with one of these (lora_index -1 reads the last of its slots).
"""

from dataclasses import replace

from storage.versions.checkpoints import Checkpoint
from storage.versions.model_files import read_adapter
from tasks.inference.api import Completion, InferenceError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's --max-lora-rank."""


def name_of(policy: Checkpoint) -> str | None:
    """Return the name under which servers have a policy's adapter; None for a policy without one.

    Attempts to make the same version have different names.
    """
    return f"policy-{policy.number}-{policy.manifest.nonce}" if policy.adapter else None


def arguments(policy: Checkpoint) -> list[str]:
    """Return the arguments of a server for a policy and for others with an adapter of its kind; none without one.

    Two adapters fit into a batch: the newest, and the one before for requests in flight. Layers without an adapter
    are left as they are. The output layer must be: with an adapter for it, which vLLM makes by default, its CPU backend
    ends when prompt logprobs are asked of several prompts at once.
    """
    if policy.adapter is None:
        return []
    lora = read_adapter(policy.adapter)
    rank = next(each for each in RANKS if each >= lora.rank)
    return ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "2", "--lora-target-modules", *lora.targets]


def of_adapter(completion: Completion, policy: Checkpoint) -> Completion:
    """Return a completion of the policy's adapter with its policy version for each token.

    Raises:
        InferenceError: the server's weights were not those of the adapter's base.
    """
    if others := set(completion.versions) - {policy.base_number}:
        raise InferenceError(f"{policy.version} was asked of weight version {sorted(others)}, not {policy.base_number}")
    return replace(completion, versions=[policy.number] * len(completion.versions))
