"""The agents by name. Add one with `register_agent("name", Class)`, or configure it as `package.module:Class`."""

from tasks.agents.interface import Agent
from tasks.agents.math_multi_turn import MathMultiTurnAgent, MathSingleStepAgent, NullAgent
from tasks.registry import Registry

AGENTS: Registry[Agent] = Registry("agent")
register_agent = AGENTS.register

register_agent("math-multi-turn", MathMultiTurnAgent)
register_agent("math-single-step", MathSingleStepAgent)
register_agent("null", NullAgent)
# These two import clients and servers, which takes seconds.
register_agent("openai", "tasks.agents.openai_agent:OpenAIAgent")
register_agent("command", "tasks.agents.command_agent:CommandAgent")
