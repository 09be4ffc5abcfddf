"""An agent of Haystack."""

from typing import Annotated

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret

from tasks.agents.endpoint.agent import AgentTask
from tasks.tools.toolbox import Toolbox


async def solve(task: AgentTask, client: object, tools: Toolbox) -> str:
    """Run the agent."""

    @tool
    async def calculator(expression: Annotated[str, "numbers and + - * /"]) -> str:
        """Compute an expression."""
        return (await tools.call("calculator", {"expression": expression})).output

    model = OpenAIChatGenerator(
        Secret.from_token(task.api_key), model=task.model, api_base_url=task.base_url, max_retries=0
    )
    agent = Agent(chat_generator=model, tools=[calculator], system_prompt="Use the calculator.")
    done = await agent.run_async(messages=[ChatMessage.from_user(task.prompt)])
    return str(done["last_message"].text)
