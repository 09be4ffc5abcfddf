"""Agents of many frameworks, each a function that plays an episode with a calculator.

A file of your own imports the framework at its top; here each function does, since nobody has all of them.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from openai import AsyncOpenAI
from pydantic import BaseModel

from tasks.agents.endpoint.agent import AgentTask
from tasks.tools.toolbox import Toolbox

BRIEF = "Use the calculator."


class Sum(BaseModel):
    """The answer to a question."""

    answer: str


def calculator_of(tools: Toolbox) -> Callable[[str], Awaitable[str]]:
    """Return the run's calculator as a function, as most frameworks take their tools."""

    async def calculator(expression: str) -> str:
        """Compute an expression.

        Args:
            expression: numbers and + - * /.
        """
        return await tools.call("calculator", {"expression": expression})

    return calculator


def server_of(task: AgentTask) -> dict[str, Any]:
    """Return where a framework's own client asks, and with which key."""
    return {"base_url": task.base_url, "api_key": task.api_key, "max_retries": 0}


async def openai_in_a_stream(task: AgentTask, client: AsyncOpenAI, tools: Toolbox) -> str:
    """Ask with OpenAI's client and its helper for streams, and call tools until the policy answers."""
    messages: list[Any] = [{"role": "developer", "content": BRIEF}]
    messages.append({"role": "user", "content": [{"type": "text", "text": task.prompt}]})
    schemas: list[Any] = tools.schemas
    while True:
        async with client.chat.completions.stream(
            model=task.model, messages=messages, tools=schemas, stream_options={"include_usage": True}
        ) as stream:
            completion = await stream.get_final_completion()
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        messages += await tools.results(message.tool_calls)


async def openai_sdk(task: AgentTask, client: AsyncOpenAI, tools: Toolbox, *, most: int = 10) -> str:
    """Run an agent of the OpenAI Agents SDK, which raises MaxTurnsExceeded without an answer after so many turns."""
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool

    tool: Any = function_tool(calculator_of(tools))
    made: Any = {"model": OpenAIChatCompletionsModel(task.model, client), "tools": [tool]}
    agent = Agent("Calculator", BRIEF, **made, model_settings=ModelSettings(parallel_tool_calls=True))
    untraced = RunConfig(tracing_disabled=True)  # otherwise traces are sent to api.openai.com
    return str((await Runner.run(agent, task.prompt, run_config=untraced, max_turns=most)).final_output)


async def langgraph(task: AgentTask, client: object, tools: Toolbox, *, most: int = 25) -> str:
    """Run a graph of LangGraph, which raises GraphRecursionError without an answer after so many steps."""
    from langchain.agents import create_agent
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=task.model, **server_of(task))
    graph = create_agent(model, [tool(calculator_of(tools))], system_prompt=BRIEF)
    asked: Any = {"messages": [{"role": "user", "content": task.prompt}]}
    done = await graph.ainvoke(asked, {"recursion_limit": most})
    return str(done["messages"][-1].content)


def pydantic_ai_agent(task: AgentTask, client: AsyncOpenAI, tools: Toolbox, kind: type = str) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(task.model, provider=OpenAIProvider(openai_client=client))
    return Agent(model, tools=[calculator_of(tools)], instructions=BRIEF, output_type=kind)


async def pydantic_ai(task: AgentTask, client: AsyncOpenAI, tools: Toolbox) -> str:
    """Run an agent of Pydantic AI."""
    return str((await pydantic_ai_agent(task, client, tools).run(task.prompt)).output)


async def pydantic_ai_structured(task: AgentTask, client: AsyncOpenAI, tools: Toolbox) -> str:
    """Run it until it calls the tool that gives the answer."""
    return str((await pydantic_ai_agent(task, client, tools, Sum).run(task.prompt)).output.answer)


async def strands(task: AgentTask, client: object, tools: Toolbox) -> str:
    """Run an agent of Strands Agents."""
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    model, made = OpenAIModel(client_args=server_of(task), model_id=task.model), tool(calculator_of(tools))
    agent = Agent(model, tools=[made], system_prompt=BRIEF, callback_handler=None)
    return str(await agent.invoke_async(task.prompt)).strip()


async def dspy(task: AgentTask, client: object, tools: Toolbox) -> str:
    """Run a ReAct agent of DSPy, which writes each step as a question of its own."""
    from dspy import LM, ReAct, context

    model = LM(f"openai/{task.model}", api_base=task.base_url, api_key=task.api_key, cache=False, num_retries=0)
    with context(lm=model):
        done = await ReAct("question -> answer", tools=[calculator_of(tools)], max_iters=3).acall(question=task.prompt)
    return str(done.answer)


async def smolagents(task: AgentTask, client: object, tools: object, *, kind: str = "ToolCallingAgent") -> str:
    """Run an agent of smolagents, a `ToolCallingAgent` or a `CodeAgent`. It is synchronous, so it runs in a thread."""
    import smolagents as library

    @library.tool
    def add(first: int, second: int) -> int:
        """Add two numbers.

        Args:
            first: a number.
            second: a number.
        """
        return first + second

    asks = {"api_base": task.base_url, "api_key": task.api_key, "client_kwargs": {"max_retries": 0}}
    made: Any = {"tools": [add], "model": library.OpenAIModel(task.model, **asks)}
    agent = getattr(library, kind)(max_steps=4, verbosity_level=-1, **made)
    return str(await asyncio.to_thread(agent.run, task.prompt))
