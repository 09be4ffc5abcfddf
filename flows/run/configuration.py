"""Load a configuration, check everything that a run needs, and describe the run without starting it (`--plan`).

The plan of a run says how many ranks, servers and GPUs it has and their memory, from the configuration alone.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from configs import Config, ConfigError, load
from flows.run.room import computed_bytes, disks
from storage.commands.program import size
from tasks.agents import AGENTS
from tasks.environments import ENVIRONMENTS
from tasks.evaluate.summary import rendered, table
from tasks.inference.devices import check_split, visible_devices
from tasks.inference.location import CONFIG, locate
from tasks.problems.mixture import naming
from tasks.score.scorers import check_scorers
from tasks.tools import check_tools
from tasks.tracking.follow import check_trackers
from tasks.train.algorithms import check_algorithm
from tasks.train.memory import CPU_TOKENS, GPU_TOKENS, ModelSizes, memory_of, served_memory
from tasks.warm_start.policy_sizes import policy_sizes


def resolve(name: str, overrides: Iterable[str] | None = None) -> Config:
    """Load a configuration with `configs.load`, and check what the schema cannot: what it names must exist.

    Raises:
        ConfigError: something is wrong; the message names the key, the value and the nearest valid name.
    """
    config = load(name, overrides or ())
    try:
        _check_players(config)
        for where, played in config.played:
            with naming(where):
                _check_players(played)
        check_scorers(config.score)
        check_algorithm(config.algorithm)
        check_trackers(config.tracking)
    except ValueError as error:
        raise ConfigError(f"configuration {name}: {error}") from None
    return config


def _check_players(config: Config) -> None:
    """Check the agent, its tools and the environment of a configuration.

    Raises:
        ValueError: a name or an argument is wrong, or the agent uses no tools.
    """
    AGENTS.check_arguments(config.agent.type, config.agent.args)
    check_tools(config.agent.tools)
    if config.agent.tools and not getattr(AGENTS.find(config.agent.type), "uses_tools", False):
        raise ValueError(
            f"agent.tools: the agent {config.agent.type!r} uses no tools; use agent.type=openai, or leave them out"
        )
    ENVIRONMENTS.check_arguments(config.environment.type, config.environment.args)


def plan(config: Config) -> str:
    """Return GPUs, ranks, servers and their memory, computed from the configuration, and the room on the disks.

    Raises:
        ValueError: the memory of the policy cannot be computed, or a server cannot divide it among its GPUs.
        StorageError: the sizes of the policy cannot be read.
    """
    sizes, tokens, knobs, mesh = policy_sizes(config), pass_tokens(config), config.inference, config.train.parallel
    policy = config.policy.path or config.policy.fork
    memory = memory_of(sizes, config.train, tokens, config.algorithm, config.policy.lora)
    split = {"num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads}
    check_split(knobs, split | {"intermediate_size": sizes.intermediate, "num_hidden_layers": sizes.layers})
    (weights, token), each = served_memory(sizes, knobs), knobs.ranks
    context = token * knobs.max_model_len
    rank, server = sum(memory.values()), each * (weights + context)
    servers, ranks = 0 if knobs.urls else knobs.replicas, mesh.ranks if config.train.device != "cpu" else 0
    shared = ". With one GPU, server and rank share it" if ranks == servers == each == 1 else ""
    of_each = " of each rollout worker" if config.plays_apart else ""
    return rendered(
        f"{config.run.name}: {policy}, {sizes.model_type} with {sizes.parameters:,} parameters",
        f"trainer: replicate {mesh.replicate} x shard {mesh.shard} ranks; GPUs: {ranks}; memory of each: {size(rank)}",
        f"vLLM servers{of_each}: {', '.join(knobs.urls) or servers}; GPUs: {servers * each or 'their own'}; memory "
        f"of each: {size(server)} or more, of which {size(each * context)} for each context of {knobs.max_model_len:,} "
        f"tokens and the rest for weights in {knobs.dtype}",
        *_beside(config),
        f"a server takes {knobs.gpu_memory_utilization:.0%} of its GPUs (inference.gpu_memory_utilization){shared}",
        f"trainer and policy together{of_each and ' (one worker)'}: GPUs: {ranks + servers * each}; memory: "
        f"{size(mesh.ranks * rank + servers * server)} or more",
        *(f"disk: {disk}" for disk in disks(config, computed_bytes(config, 4 * sizes.parameters))),
        table(
            f"Memory of each rank, with {tokens:,} tokens in a forward pass (computed)",
            [
                *({"of": part, "memory": size(count)} for part, count in memory.items()),
                {"of": "total, an upper bound; a GPU also needs some GB for CUDA and NCCL", "memory": size(rank)},
            ],
        ),
    )


def _beside(config: Config) -> Iterator[str]:
    """Yield a line for each model beside the policy that is served: its servers, and what it is asked."""
    episodes = config.rollout.problems_per_iteration * config.rollout.group_size
    for role, knobs in config.models.served().items():
        named, memory = knobs.path or f"{getattr(knobs, 'name', None)}, which nothing proves", "unknown"
        found = locate(knobs.path, [CONFIG], f"models.{role}.path") if knobs.path else None
        with contextlib.suppress(ValueError):  # a model of a kind whose sizes are not known
            if isinstance(found, Path):
                weights, token = served_memory(ModelSizes.of(json.loads((found / CONFIG).read_bytes())), knobs)
                memory = f"{size(weights + token * knobs.max_model_len)} or more"
        servers = (
            ", ".join(knobs.urls) or f"vLLM servers: {knobs.replicas}; GPUs of each: {knobs.ranks}; memory: {memory}"
        )
        asked = "each of" if role == "teacher" else "each graded turn of"
        more = "" if role == "teacher" else ", and of evaluations"
        yield f"models.{role}: {named}; {servers}; asked about {asked} {episodes:,} episodes an iteration{more}"


def pass_tokens(config: Config) -> int:
    """Return the largest number of tokens in a forward pass: a sequence that is longer than the limit is a pass alone.

    The default of `train.micro_batch_tokens` is that of this machine.
    """
    train = config.train
    on_cpu = train.device == "cpu" or (train.device == "auto" and not visible_devices())
    return max(train.micro_batch_tokens or (CPU_TOKENS if on_cpu else GPU_TOKENS), config.inference.max_model_len)
