"""Load a configuration and check everything that a run needs: schema, agent, environment, scorers and estimator."""

from collections.abc import Iterable

from configs import Config, ConfigError, load
from tasks.agents import AGENTS
from tasks.environments import ENVIRONMENTS
from tasks.score.scorers import check_scorers
from tasks.train.advantages import check_estimator


def resolve(name: str, overrides: Iterable[str] | None = None) -> Config:
    """Load a configuration with `configs.load`, and check what the schema cannot: what it names must exist.

    Raises:
        ConfigError: something is wrong; the message names the key, the value and the nearest valid name.
    """
    config = load(name, overrides or ())
    try:
        AGENTS.check_arguments(config.agent.type, config.agent.args)
        ENVIRONMENTS.check_arguments(config.environment.type, config.environment.args)
        check_scorers(config.score)
        check_estimator(config.ppo.advantage.type)
    except ValueError as error:
        raise ConfigError(f"configuration {name}: {error}") from None
    return config
