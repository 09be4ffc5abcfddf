"""Load a configuration, check everything that a run needs, and describe the run without starting it (`--plan`).

The plan of a run says how many ranks, servers and GPUs it has and their memory, from the configuration alone.
"""

from collections.abc import Iterable

from configs import Config, ConfigError, load
from storage.commands.program import size
from tasks.agents import AGENTS
from tasks.environments import ENVIRONMENTS
from tasks.evaluate.summary import rendered, table
from tasks.inference.devices import devices_of_a_server, visible_devices
from tasks.score.scorers import check_scorers
from tasks.tools import check_tools
from tasks.tracking.follow import check_trackers
from tasks.train.advantages import check_estimator
from tasks.train.memory import CPU_TOKENS, GPU_TOKENS, memory_of, served_memory
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


def plan(config: Config) -> str:
    """Return GPUs, ranks, servers and their memory, computed from the configuration.

    Raises:
        ValueError: the memory of the policy cannot be computed.
        StorageError: the sizes of the policy cannot be read.
    """
    sizes, tokens, knobs, mesh = policy_sizes(config), pass_tokens(config), config.inference, config.ppo.parallel
    policy = config.policy.path or config.policy.fork or "a warm start"
    memory = memory_of(sizes, config.ppo, tokens, config.policy.lora)
    rank, server, each = sum(memory.values()), served_memory(sizes, knobs), devices_of_a_server(knobs.extra_args)
    servers, ranks = 0 if knobs.urls else knobs.replicas, mesh.ranks if config.ppo.device != "cpu" else 0
    shared = ". With one GPU, server and rank share it" if ranks == servers == each == 1 else ""
    of_each = " of each rollout worker" if config.plays_apart else ""
    return rendered(
        f"{config.run.name}: {policy}, {sizes.model_type} with {sizes.parameters:,} parameters",
        f"trainer: replicate {mesh.replicate} x shard {mesh.shard} ranks; GPUs: {ranks}; memory of each: {size(rank)}",
        f"vLLM servers{of_each}: {', '.join(knobs.urls) or servers}; GPUs: {servers * each or 'their own'}; memory "
        f"of each: {size(server)} or more (weights in {knobs.dtype}, one context of {knobs.max_model_len:,} tokens)",
        f"a server takes {knobs.gpu_memory_utilization:.0%} of its GPUs (inference.gpu_memory_utilization){shared}",
        f"together{of_each and ' (one worker)'}: GPUs: {ranks + servers * each}; memory: "
        f"{size(mesh.ranks * rank + servers * server)} or more",
        table(
            f"Memory of each rank, with {tokens:,} tokens in a forward pass (computed)",
            [
                *({"of": part, "memory": size(count)} for part, count in memory.items()),
                {"of": "total, an upper bound; a GPU also needs some GB for CUDA and NCCL", "memory": size(rank)},
            ],
        ),
    )


def pass_tokens(config: Config) -> int:
    """Return the largest number of tokens in a forward pass: a sequence that is longer than the limit is a pass alone.

    The default of `ppo.micro_batch_tokens` is that of this machine.
    """
    ppo = config.ppo
    on_cpu = ppo.device == "cpu" or (ppo.device == "auto" and not visible_devices())
    return max(ppo.micro_batch_tokens or (CPU_TOKENS if on_cpu else GPU_TOKENS), config.inference.max_model_len)
