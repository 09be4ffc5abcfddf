"""An agent of agno, which writes ids of its own for calls."""

from agno.agent import Agent
from agno.models.openai.like import OpenAILike

from tasks.agents.endpoint.agent import AgentTask
from tasks.tools.toolbox import Toolbox


def make_agent(task: AgentTask, tools: Toolbox) -> Agent:
    """Return an agent whose tool is a function of its own."""

    async def calculator(expression: str) -> str:
        """Compute an expression of numbers and + - * /."""
        return (await tools.call("calculator", {"expression": expression})).output

    model = OpenAILike(id=task.model, base_url=task.base_url, api_key=task.api_key, max_retries=0)
    return Agent(model=model, tools=[calculator], instructions="Use the calculator.", telemetry=False)


async def solve(task: AgentTask, client: object, tools: Toolbox) -> str:
    """Run the agent."""
    return str((await make_agent(task, tools).arun(task.prompt)).content)


async def solve_in_a_stream(task: AgentTask, client: object, tools: Toolbox) -> str:
    """Run it and read its events while it works."""
    said = ""
    async for event in make_agent(task, tools).arun(task.prompt, stream=True):
        said += str(getattr(event, "content", None) or "")
    return said
