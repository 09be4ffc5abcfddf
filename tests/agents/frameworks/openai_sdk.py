"""Agents of the OpenAI Agents SDK."""

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

from tasks.agents.endpoint.agent import AgentTask
from tasks.tools.toolbox import Toolbox

NO_TRACES = RunConfig(tracing_disabled=True)  # otherwise they are sent to api.openai.com


def make_agent(task: AgentTask, client: AsyncOpenAI, tools: Toolbox) -> Agent:
    """Return an agent whose tool is a function of its own."""

    @function_tool
    async def calculator(expression: str) -> str:
        """Compute an expression.

        Args:
            expression: numbers and + - * /.
        """
        return (await tools.call("calculator", {"expression": expression})).output

    model = OpenAIChatCompletionsModel(task.model, openai_client=client)
    settings = ModelSettings(parallel_tool_calls=True)
    return Agent("Calculator", "Use the calculator.", model=model, tools=[calculator], model_settings=settings)


async def solve(task: AgentTask, client: AsyncOpenAI, tools: Toolbox, *, most: int = 10) -> str:
    """Run the agent, which raises MaxTurnsExceeded if it has no answer after so many turns."""
    result = await Runner.run(make_agent(task, client, tools), task.prompt, run_config=NO_TRACES, max_turns=most)
    return str(result.final_output)


async def solve_in_a_stream(task: AgentTask, client: AsyncOpenAI, tools: Toolbox) -> str:
    """Run it and read its events while it works."""
    result = Runner.run_streamed(make_agent(task, client, tools), task.prompt, run_config=NO_TRACES)
    async for _ in result.stream_events():
        pass
    return str(result.final_output)
