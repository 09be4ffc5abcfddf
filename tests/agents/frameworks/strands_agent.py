"""An agent of Strands Agents."""

from strands import Agent, tool
from strands.models.openai import OpenAIModel

from tasks.agents.endpoint.agent import AgentTask
from tasks.tools.toolbox import Toolbox


async def solve(task: AgentTask, client: object, tools: Toolbox) -> str:
    """Run the agent."""

    @tool
    async def calculator(expression: str) -> str:
        """Compute an expression.

        Args:
            expression: numbers and + - * /.
        """
        return (await tools.call("calculator", {"expression": expression})).output

    asks = {"base_url": task.base_url, "api_key": task.api_key, "max_retries": 0}
    agent = Agent(
        OpenAIModel(client_args=asks, model_id=task.model),
        tools=[calculator],
        system_prompt="Use the calculator.",
        callback_handler=None,
    )
    return str(await agent.invoke_async(task.prompt)).strip()
