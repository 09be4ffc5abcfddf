"""A configuration ready to run: validated, its agent and environment found and their arguments checked."""

from collections.abc import Iterable

from configs import Config, ConfigError, load


def resolve(name: str, overrides: Iterable[str] | None = None) -> Config:
    """`configs.load`, and a check of everything that the schema cannot know.

    Raises:
        ConfigError: naming the key, the value and the nearest valid name.
    """
    from tasks.agents import AGENTS
    from tasks.environments import ENVIRONMENTS
    from tasks.train.advantages import check_estimator

    config = load(name, overrides or ())
    try:
        AGENTS.check_arguments(config.agent.type, config.agent.args)
        ENVIRONMENTS.check_arguments(config.environment.type, config.environment.args)
        check_estimator(config.ppo.advantage.type)
    except ValueError as error:
        raise ConfigError(f"configuration {name}: {error}") from None
    return config
