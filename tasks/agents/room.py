"""A warning for configurations in which the turns of an episode may not fit into the model's context."""

import inspect

from configs import Config
from tasks.agents import AGENTS


def lacking_room(config: Config) -> str | None:
    """Return a warning if the turns of an episode may not fit into the context; None if they do or if that is unknown.

    It is known for agents with an argument `num_turns`. Prompt and feedback need further room, which is not counted.
    """
    turns = _turns(config)
    context, longest = config.inference.max_model_len, config.sampling.max_new_tokens
    if turns is None or turns * longest < context:
        return None
    return (
        f"{turns} turns of {longest} tokens do not fit into inference.max_model_len={context}: turns for which the "
        "context has no room count as wrong answers. Raise inference.max_model_len, or lower agent.args.num_turns or "
        "sampling.max_new_tokens"
    )


def _turns(config: Config) -> int | None:
    """Return the most turns of an episode: the agent's argument, or its default."""
    parameter = inspect.signature(AGENTS.find(config.agent.type)).parameters.get("num_turns")
    turns = config.agent.args.get("num_turns", parameter.default if parameter else None)
    return turns if isinstance(turns, int) else None
