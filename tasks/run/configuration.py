"""Load a configuration and check everything that a run needs: schema, and what it names."""

from collections.abc import Iterable

from configs import Config, ConfigError, load
from tasks.agents import AGENTS
from tasks.environments import ENVIRONMENTS
from tasks.score.scorers import check_scorers
from tasks.tools import check_tools
from tasks.train.advantages import check_estimator


def resolve(name: str, overrides: Iterable[str] | None = None) -> Config:
    """Load a configuration with `configs.load`, and check what the schema cannot: what it names must exist.

    Raises:
        ConfigError: something is wrong; the message names the key, the value and the nearest valid name.
    """
    config = load(name, overrides or ())
    try:
        AGENTS.check_arguments(config.agent.type, config.agent.args)
        check_tools(config.agent.tools)
        _check_use(config)
        ENVIRONMENTS.check_arguments(config.environment.type, config.environment.args)
        check_scorers(config.score)
        check_estimator(config.ppo.advantage.type)
    except ValueError as error:
        raise ConfigError(f"configuration {name}: {error}") from None
    return config


def _check_use(config: Config) -> None:
    """Check that the agent uses the tools that it is given."""
    if config.agent.tools and not getattr(AGENTS.find(config.agent.type), "uses_tools", False):
        raise ValueError(
            f"agent.tools: the agent {config.agent.type!r} uses no tools; use agent.type=openai, or leave them out"
        )
