"""The agent with one completion and one verdict."""

from tasks.agents.interface import AgentContext
from tasks.agents.math_multi_turn import MathMultiTurnAgent


class MathSingleStepAgent(MathMultiTurnAgent):
    """The agent `math-multi-turn` with a single turn.

    Args:
        context: the pipeline gives it to every agent.
        system_prompt: first message, if not empty.
        instruction: appended to the problem's text.
    """

    def __init__(self, context: AgentContext, *, system_prompt: str = "", instruction: str = "") -> None:
        super().__init__(context, num_turns=1, system_prompt=system_prompt, instruction=instruction)
