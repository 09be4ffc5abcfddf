"""Load a configuration, check everything that a run needs, and describe the run without starting it (`--plan`).

The plan of a run says how many ranks and servers it has and the trainer's memory, from the configuration alone.
"""

from collections.abc import Iterable

from configs import Config, ConfigError, load
from storage.commands.program import size
from tasks.agents import AGENTS
from tasks.environments import ENVIRONMENTS
from tasks.evaluate.summary import rendered, table
from tasks.inference.devices import visible_devices
from tasks.score.scorers import check_scorers
from tasks.tools import check_tools
from tasks.tracking.follow import check_trackers
from tasks.train.advantages import check_estimator
from tasks.train.memory import CHUNK_TOKENS, CPU_TOKENS, GPU_TOKENS, memory_of
from tasks.warm_start.policy_sizes import policy_sizes


def resolve(name: str, overrides: Iterable[str] | None = None) -> Config:
    """Load a configuration with `configs.load`, and check what the schema cannot: what it names must exist.

    Raises:
        ConfigError: something is wrong; the message names the key, the value and the nearest valid name.
    """
    config = load(name, overrides or ())
    try:
        AGENTS.check_arguments(config.agent.type, config.agent.args)
        check_tools(config.agent.tools)
        if config.agent.tools and not getattr(AGENTS.find(config.agent.type), "uses_tools", False):
            raise ValueError(
                f"agent.tools: the agent {config.agent.type!r} uses no tools; use agent.type=openai, or leave them out"
            )
        ENVIRONMENTS.check_arguments(config.environment.type, config.environment.args)
        check_scorers(config.score)
        check_estimator(config.ppo.advantage.type)
        check_trackers(config.tracking)
    except ValueError as error:
        raise ConfigError(f"configuration {name}: {error}") from None
    return config


_PARTS = {
    "weights": "float32",
    "gradients": "float32",
    "moments": "AdamW",
    "others": "reference policy, critic of its own",
    "gathered": "what FSDP holds whole for a while",
    "casts": "bfloat16 casts of weights",
    "activations": "what a forward pass leaves for the backward pass",
    "logits": f"of {CHUNK_TOKENS:,} tokens",
    "total": "an upper bound; a GPU also needs some GB for CUDA and NCCL",
}
"""Explanations of the parts of `Memory`."""


def plan(config: Config) -> str:
    """Describe a run without starting anything.

    Raises:
        ValueError: the memory of the policy cannot be computed.
        StorageError: the sizes of the policy cannot be read.
    """
    sizes, tokens = policy_sizes(config), pass_tokens(config)
    memory, policy = memory_of(sizes, config.ppo, tokens), config.policy.path or config.policy.fork or "a warm start"
    mesh, servers = config.ppo.parallel, config.inference.urls or config.inference.replicas
    return rendered(
        f"{config.run.name}: {policy}, {sizes.model_type} with {sizes.parameters:,} parameters",
        f"ranks of the trainer: replicate {mesh.replicate} x shard {mesh.shard}; vLLM servers: {servers}",
        table(
            f"Memory of each rank, with {tokens:,} tokens in a forward pass (computed)",
            [{"part": part, "memory": size(getattr(memory, part)), "what": what} for part, what in _PARTS.items()],
        ),
    )


def pass_tokens(config: Config) -> int:
    """Return the largest number of tokens in a forward pass: a sequence that is longer than the limit is a pass alone.

    The default of `ppo.micro_batch_tokens` is that of this machine.
    """
    ppo = config.ppo
    on_cpu = ppo.device == "cpu" or (ppo.device == "auto" and not visible_devices())
    return max(ppo.micro_batch_tokens or (CPU_TOKENS if on_cpu else GPU_TOKENS), config.inference.max_model_len)
