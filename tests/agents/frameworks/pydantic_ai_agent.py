"""Agents of Pydantic AI: one that answers in words, and one whose answer is a call of a tool of the library's."""

from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tasks.agents.endpoint.agent import AgentTask
from tasks.tools.toolbox import Toolbox


class Sum(BaseModel):
    answer: str


def make_agent(task: AgentTask, client: AsyncOpenAI, tools: Toolbox, kind: type = str) -> Agent:
    """Return an agent whose tool is a function of its own, and whose output is of this kind."""

    async def calculator(expression: str) -> str:
        """Compute an expression of numbers and + - * /."""
        return (await tools.call("calculator", {"expression": expression})).output

    model = OpenAIChatModel(task.model, provider=OpenAIProvider(openai_client=client))
    return Agent(model, tools=[calculator], instructions="Use the calculator.", output_type=kind)


async def solve(task: AgentTask, client: AsyncOpenAI, tools: Toolbox) -> str:
    """Run the agent."""
    return str((await make_agent(task, client, tools).run(task.prompt)).output)


async def solve_in_a_stream(task: AgentTask, client: AsyncOpenAI, tools: Toolbox) -> str:
    """Run it and read its words while it works."""
    async with make_agent(task, client, tools).run_stream(task.prompt) as result:
        return str(await result.get_output())


async def solve_structured(task: AgentTask, client: AsyncOpenAI, tools: Toolbox) -> str:
    """Run it until it calls the tool that gives the answer."""
    return str((await make_agent(task, client, tools, Sum).run(task.prompt)).output.answer)
