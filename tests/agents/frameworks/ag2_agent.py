"""An agent of AG2."""

from ag2 import Agent
from ag2.config import OpenAIConfig

from tasks.agents.endpoint.agent import AgentTask
from tasks.tools.toolbox import Toolbox


async def solve(task: AgentTask, client: object, tools: Toolbox) -> str:
    """Run the agent."""

    async def calculator(expression: str) -> str:
        """Compute an expression of numbers and + - * /."""
        return (await tools.call("calculator", {"expression": expression})).output

    config = OpenAIConfig(model=task.model, base_url=task.base_url, api_key=task.api_key, max_retries=0)
    agent = Agent("calculating", "Use the calculator.", config=config, tools=[calculator])
    return str(await (await agent.ask(task.prompt)).content())
