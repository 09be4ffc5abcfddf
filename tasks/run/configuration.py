"""Load a configuration, check everything that a run needs, and describe the run without starting it (`--dry-run`).

The plan of a run says its devices, the trainer's memory and the data of an iteration, from the configuration alone.
"""

from collections.abc import Iterable

from configs import Config, ConfigError, load
from storage.commands.program import size
from tasks.agents import AGENTS
from tasks.environments import ENVIRONMENTS
from tasks.evaluate.summary import Row, rendered, table
from tasks.inference.devices import devices_of_a_server, visible_devices
from tasks.score.scorers import check_scorers
from tasks.tools import check_tools
from tasks.train.advantages import check_estimator
from tasks.train.memory import CHUNK_TOKENS, CPU_TOKENS, GPU_TOKENS, Memory, ModelSizes, memory_of
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
    memory, policy = memory_of(sizes, config.ppo, tokens), config.policy.path or "a warm start"
    return rendered(
        f"{config.run.name}: {policy}, {sizes.model_type} with {sizes.parameters:,} parameters",
        table("Devices", [_trainer(config, memory), _servers(config)]),
        f"{_gpus(config)}\n",
        table(
            f"Memory of each rank, with {tokens:,} tokens in a forward pass (computed)",
            [{"part": part, "memory": size(getattr(memory, part)), "what": what} for part, what in _PARTS.items()],
        ),
        table("One iteration, at most", _iteration_rows(config, sizes)),
    )


def pass_tokens(config: Config) -> int:
    """Return the largest number of tokens in a forward pass: a sequence that is longer than the limit is a pass alone.

    The default of `ppo.micro_batch_tokens` is that of this machine.
    """
    ppo = config.ppo
    on_cpu = ppo.device == "cpu" or (ppo.device == "auto" and not visible_devices())
    return max(ppo.micro_batch_tokens or (CPU_TOKENS if on_cpu else GPU_TOKENS), config.inference.max_model_len)


def _trainer(config: Config, memory: Memory) -> Row:
    parallel, otherwise = config.ppo.parallel, "; the CPU if it has none" if config.ppo.device == "auto" else ""
    on_cluster = config.trains_apart and config.cluster.address
    return {
        "what": "trainer",
        "processes": f"{_count(parallel.ranks, 'rank')}: replicate {parallel.replicate} x shard {parallel.shard}",
        "where": "nodes of the cluster" if on_cluster else "the flow's host",
        "devices": "the CPU" if config.ppo.device == "cpu" else f"the first {_count(parallel.ranks, 'GPU')}{otherwise}",
        "memory of each": size(memory.total),
    }


def _servers(config: Config) -> Row:
    settings, of_each = config.inference, devices_of_a_server(config.inference.extra_args)
    host, whose = "the flow's host", ""
    if config.plays_apart:
        host, whose = "its node", " of each rollout worker" * (not settings.urls)
    devices = f"the last {_count(settings.replicas * of_each, 'GPU')}, {of_each} for each; the CPU if it has none"
    return {
        "what": "vLLM",
        "processes": _count(len(settings.urls) or settings.replicas, "server") + whose,
        "where": ", ".join(settings.urls) or host,
        "devices": "as started" if settings.urls else devices,
        "memory of each": "as started" if settings.urls else f"{settings.gpu_memory_utilization:.0%} of a GPU",
    }


def _gpus(config: Config) -> str:
    """Say how many GPUs the flow's host needs, or the nodes of a cluster."""
    ranks, of_each = config.ppo.parallel.ranks, devices_of_a_server(config.inference.extra_args)
    servers = config.inference.replicas * of_each
    if config.cluster.address not in (None, "local"):
        trained = "the cluster" if config.trains_apart else "the flow's host"
        played = f", and each rollout worker {_count(servers, 'GPU')}" if config.plays_apart else ""
        return f"On GPUs, {trained} needs {_count(ranks, 'GPU')} for the trainer{played}."
    servers = 0 if config.inference.urls else servers * config.cluster.workers_per_node
    fewer = " If it has fewer, they share some: then both must fit into the memory of one." if servers else ""
    if config.plays_apart:
        fewer = " If it has fewer, fewer workers start."
    needed = _count(ranks + servers, "GPU")
    return f"On GPUs, the flow's host needs {needed}: {ranks} for the trainer, {servers} for servers.{fewer}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _iteration_rows(config: Config, sizes: ModelSizes) -> list[Row]:
    rollout, ppo, context = config.rollout, config.ppo, config.inference.max_model_len
    played = rollout.generation_size or rollout.group_size
    episodes, weights = rollout.problems_per_iteration * played, 4 * sizes.parameters
    own_critic, moving = ppo.critic is not None and ppo.critic.model == "own", ppo.kl.reference == "ema"
    state = (2 + 3 * own_critic + moving) * weights
    servers = len(config.inference.urls) or config.inference.replicas
    halved = weights // 2 if config.storage.serving_copy else 0
    numbers = {
        "episodes": f"{rollout.problems_per_iteration:,} problems x {played} = {episodes:,}",
        "tokens of trajectories": f"{episodes:,} x {context:,} (inference.max_model_len) = {episodes * context:,}",
        "weights written to the store": size(weights + halved),
        "train state written to the store": size(state),
        "weights read by servers": f"{servers} x {size(halved or weights)}",
    }
    return [{"what": what, "how much": number} for what, number in numbers.items()]
