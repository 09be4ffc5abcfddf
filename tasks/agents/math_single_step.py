"""One completion, judged once."""

from tasks.agents.interface import AgentContext
from tasks.agents.math_multi_turn import MathMultiTurnAgent


class MathSingleStepAgent(MathMultiTurnAgent):
    """`math-multi-turn` with a single turn.

    Args:
        context: what the pipeline gives every agent.
        system_prompt: first message, where given.
        instruction: appended to the problem's text.
    """

    def __init__(self, context: AgentContext, *, system_prompt: str = "", instruction: str = "") -> None:
        super().__init__(context, num_turns=1, system_prompt=system_prompt, instruction=instruction)
