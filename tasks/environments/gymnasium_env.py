"""Text environments of the package Gymnasium."""

import asyncio
import json
import re
from typing import Any

from tasks.environments.interface import EnvironmentContext, problem_of

try:
    import gymnasium
except ModuleNotFoundError as error:
    raise ValueError("environment.type=gymnasium: its package is not installed: pip install gymnasium") from error

_COLOURED = re.compile(r"\x1b\[[\d;]*+m([^\x1b]*+)\x1b\[0?m")


class GymnasiumEnvironment:
    """An environment of Gymnasium, whose actions are texts or have names.

    What it observes reaches the policy as a text: as it is, or as `render` draws it with `render_mode: ansi`, coloured
    characters in brackets. The first observation follows the problem's prompt, which tells the rules. The newest name
    of an action in an answer is its action; an answer without one leaves the environment as it was.

    Episodes differ by their seeds, unless the problem's metadata have a `seed`: then those of its group begin alike.
    `options` in the metadata are given to `reset`.

    A step that earns nothing and ends nothing has the verdict `none`. Others have that of `success` or `is_success` in
    the environment's `info`, if there is one, and the named `parts` of the reward in it.

    Args:
        context: the pipeline gives it to every environment.
        id: of the environment, such as `FrozenLake-v1`; `my_games:Guess-v0` imports `my_games` before.
        arguments: keyword arguments of `gymnasium.make`.
        actions: names of the actions of a `Discrete` space, in its order; by default their numbers.

    Raises:
        ValueError: the actions are no texts, and have no names.
    """

    def __init__(
        self,
        context: EnvironmentContext,
        *,
        id: str,  # noqa: A002  # Gymnasium's word
        arguments: dict[str, Any] | None = None,
        actions: list[str] | None = None,
    ) -> None:
        self._environment = gymnasium.make(id, **(arguments or {}))
        self._names = _names(self._environment.action_space, actions)

    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        problem = problem_of(options)
        metadata = json.loads(problem.metadata)
        begin = {"seed": metadata.get("seed", seed), "options": metadata.get("options")}
        observation, _ = await asyncio.to_thread(self._environment.reset, **begin)
        return f"{problem.prompt}\n\n{self._shown(observation)}", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        chosen = self._chosen(action)
        if chosen is None:
            wanted = f"one of {', '.join(self._names)}" if self._names else str(self._environment.action_space)
            return f"This is no action. Answer with {wanted}.", 0.0, False, False, {"verdict": "unparsable"}
        observation, reward, terminated, truncated, info = await asyncio.to_thread(self._environment.step, chosen)
        outcome = {name.removeprefix("is_"): info[name] for name in ("is_success", "success", "parts") if name in info}
        if not (terminated or truncated or reward or outcome.get("success")):
            outcome = {"verdict": "none"}
        return self._shown(observation), float(reward), bool(terminated), bool(truncated), outcome

    async def close(self) -> None:
        await asyncio.to_thread(self._environment.close)

    def _shown(self, observation: Any) -> str:
        if self._environment.render_mode == "ansi":
            return _COLOURED.sub(r"[\1]", str(self._environment.render())).strip("\n")
        return str(observation)

    def _chosen(self, answer: str) -> Any:
        """Return the action of an answer; None if it has none."""
        space = self._environment.action_space
        if not self._names:
            return answer if space.contains(answer) else None
        words = "|".join(re.escape(name) for name in sorted(self._names, key=len, reverse=True))
        found = re.findall(rf"(?<!\w)(?:{words})(?!\w)", answer, re.IGNORECASE)
        return space.start + self._names[found[-1].lower()] if found else None


def _names(space: Any, names: list[str] | None) -> dict[str, int]:
    """Return the names of the actions of a space, in lower case, with their positions; none for texts."""
    if isinstance(space, gymnasium.spaces.Text):
        return {}
    if not isinstance(space, gymnasium.spaces.Discrete):
        raise ValueError(f"environment.args.id: its actions are {space}: only Text and Discrete spaces are supported")
    given = names or [str(number) for number in range(space.start, space.start + space.n)]
    positions = {name.lower(): position for position, name in enumerate(given)}
    if len(positions) != space.n:
        raise ValueError(f"environment.args.actions={names}: give {space.n} different names, one for each action")
    return positions
