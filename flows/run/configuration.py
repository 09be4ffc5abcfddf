"""Load a configuration, check everything that a run needs, and describe the run without starting it (`--plan`)."""

from collections.abc import Iterable

from configs import Config, ConfigError, load
from tasks.agents import AGENTS
from tasks.environments import ENVIRONMENTS
from tasks.evaluate.summary import rendered
from tasks.inference.devices import check_split
from tasks.problems.mixture import naming
from tasks.score.scorers import check_scorers
from tasks.tools import check_tools
from tasks.tracking.follow import check_trackers
from tasks.train.algorithms import check_algorithm
from tasks.warm_start.policy_sizes import policy_values


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
    """Return ranks, servers and GPUs of a run, as the configuration alone says.

    Raises:
        ValueError: a server cannot divide the policy among its GPUs.
        StorageError: the sizes of the policy cannot be read.
    """
    values, knobs, mesh = policy_values(config), config.inference, config.train.parallel
    check_split(knobs, values)
    sizes = ", ".join(f"{name} {values[name]}" for name in ("num_hidden_layers", "hidden_size") if name in values)
    policy = config.policy.path or config.policy.fork
    servers, ranks = 0 if knobs.urls else knobs.replicas, mesh.ranks if config.train.device != "cpu" else 0
    shared = ". With one GPU, server and rank share it" if ranks == servers == knobs.ranks == 1 else ""
    of_each = " of each rollout worker" if config.plays_apart else ""
    return rendered(
        f"{config.run.name}: {policy}, {values.get('model_type')} with {sizes or 'sizes of its own'}",
        f"trainer: replicate {mesh.replicate} x shard {mesh.shard} ranks; GPUs: {ranks}",
        f"vLLM servers{of_each}: {', '.join(knobs.urls) or servers}; GPUs: {servers * knobs.ranks or 'their own'}",
        f"a server takes {knobs.gpu_memory_utilization:.0%} of its GPUs (inference.gpu_memory_utilization){shared}",
        f"trainer and policy together{of_each and ' (one worker)'}: GPUs: {ranks + servers * knobs.ranks}",
        "memory: an update says what it took at most on a GPU (the metric memory/peak_gib)",
    )
