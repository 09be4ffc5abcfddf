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


async def openai(task: AgentTask, client: AsyncOpenAI, tools: Toolbox) -> str:
    """Ask with OpenAI's client, and call tools until the policy answers."""
    messages: list[Any] = [{"role": "developer", "content": BRIEF}]
    messages.append({"role": "user", "content": [{"type": "text", "text": task.prompt}]})
    schemas: list[Any] = tools.schemas
    while True:
        completion = await client.chat.completions.create(
            model=task.model, messages=messages, tools=schemas, tool_choice="auto", parallel_tool_calls=True
        )
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        messages += await tools.results(message.tool_calls)


async def openai_in_a_stream(task: AgentTask, client: AsyncOpenAI, tools: Toolbox) -> str:
    """Do the same with the client's helper for streams."""
    messages: list[Any] = [{"role": "user", "content": task.prompt}]
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


async def litellm(task: AgentTask, client: object, tools: Toolbox) -> str:
    """Ask with LiteLLM, and call tools until the policy answers."""
    from litellm import acompletion

    messages: list[Any] = [{"role": "user", "content": task.prompt}]
    while True:
        completion = await acompletion(f"openai/{task.model}", messages, tools=tools.schemas, **server_of(task))
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return str(message.content)
        messages += await tools.results(message.tool_calls)


def sdk_agent(task: AgentTask, client: AsyncOpenAI, tools: Toolbox) -> Any:
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, function_tool

    model, settings = OpenAIChatCompletionsModel(task.model, client), ModelSettings(parallel_tool_calls=True)
    tool: Any = function_tool(calculator_of(tools))
    return Agent("Calculator", BRIEF, model=model, tools=[tool], model_settings=settings)


async def openai_sdk(task: AgentTask, client: AsyncOpenAI, tools: Toolbox, *, most: int = 10) -> str:
    """Run an agent of the OpenAI Agents SDK, which raises MaxTurnsExceeded without an answer after so many turns."""
    from agents import RunConfig, Runner

    untraced = RunConfig(tracing_disabled=True)  # otherwise traces are sent to api.openai.com
    result = await Runner.run(sdk_agent(task, client, tools), task.prompt, run_config=untraced, max_turns=most)
    return str(result.final_output)


async def openai_sdk_in_a_stream(task: AgentTask, client: AsyncOpenAI, tools: Toolbox) -> str:
    """Run it and read its events while it works."""
    from agents import RunConfig, Runner

    untraced = RunConfig(tracing_disabled=True)
    result = Runner.run_streamed(sdk_agent(task, client, tools), task.prompt, run_config=untraced)
    async for _ in result.stream_events():
        pass
    return str(result.final_output)


def react_graph(task: AgentTask, tools: Toolbox) -> Any:
    from langchain.agents import create_agent
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    return create_agent(
        ChatOpenAI(model=task.model, **server_of(task)), [tool(calculator_of(tools))], system_prompt=BRIEF
    )


async def langgraph(task: AgentTask, client: object, tools: Toolbox, *, most: int = 25) -> str:
    """Run a graph of LangGraph, which raises GraphRecursionError without an answer after so many steps."""
    asked = {"messages": [{"role": "user", "content": task.prompt}]}
    done = await react_graph(task, tools).ainvoke(asked, {"recursion_limit": most})
    return str(done["messages"][-1].content)


async def langgraph_in_a_stream(task: AgentTask, client: object, tools: Toolbox) -> str:
    """Run it and read its messages while it works."""
    asked = {"messages": [{"role": "user", "content": task.prompt}]}
    said = ""
    async for message, _ in react_graph(task, tools).astream(asked, stream_mode="messages"):
        said = said + str(message.content) if message.type == "AIMessageChunk" else ""
    return said


def pydantic_ai_agent(task: AgentTask, client: AsyncOpenAI, tools: Toolbox, kind: type = str) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(task.model, provider=OpenAIProvider(openai_client=client))
    return Agent(model, tools=[calculator_of(tools)], instructions=BRIEF, output_type=kind)


async def pydantic_ai(task: AgentTask, client: AsyncOpenAI, tools: Toolbox) -> str:
    """Run an agent of Pydantic AI."""
    return str((await pydantic_ai_agent(task, client, tools).run(task.prompt)).output)


async def pydantic_ai_in_a_stream(task: AgentTask, client: AsyncOpenAI, tools: Toolbox) -> str:
    """Run it and read its words while it works."""
    async with pydantic_ai_agent(task, client, tools).run_stream(task.prompt) as result:
        return str(await result.get_output())


async def pydantic_ai_structured(task: AgentTask, client: AsyncOpenAI, tools: Toolbox) -> str:
    """Run it until it calls the tool that gives the answer."""
    return str((await pydantic_ai_agent(task, client, tools, Sum).run(task.prompt)).output.answer)


def agno_agent(task: AgentTask, tools: Toolbox) -> Any:
    from agno.agent import Agent
    from agno.models.openai.like import OpenAILike

    model = OpenAILike(id=task.model, **server_of(task))
    return Agent(model=model, tools=[calculator_of(tools)], instructions=BRIEF, telemetry=False)


async def agno(task: AgentTask, client: object, tools: Toolbox) -> str:
    """Run an agent of agno, which writes ids of its own for calls."""
    return str((await agno_agent(task, tools).arun(task.prompt)).content)


async def agno_in_a_stream(task: AgentTask, client: object, tools: Toolbox) -> str:
    """Run it and read its events while it works."""
    said = ""
    async for event in agno_agent(task, tools).arun(task.prompt, stream=True):
        said += str(getattr(event, "content", None) or "")
    return said


async def ag2(task: AgentTask, client: object, tools: Toolbox) -> str:
    """Run an agent of AG2."""
    from ag2 import Agent
    from ag2.config import OpenAIConfig

    config = OpenAIConfig(model=task.model, **server_of(task))
    agent = Agent("calculating", BRIEF, config=config, tools=[calculator_of(tools)])
    return str(await (await agent.ask(task.prompt)).content())


async def llama_index(task: AgentTask, client: object, tools: Toolbox) -> str:
    """Run an agent of LlamaIndex."""
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    asks = {"api_base": task.base_url, "api_key": task.api_key, "max_retries": 0}
    model = OpenAILike(model=task.model, is_chat_model=True, is_function_calling_model=True, **asks)
    return str(await FunctionAgent(tools=[calculator_of(tools)], llm=model, system_prompt=BRIEF).run(task.prompt))


async def haystack(task: AgentTask, client: object, tools: Toolbox) -> str:
    """Run an agent of Haystack."""
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    key = Secret.from_token(task.api_key)
    model = OpenAIChatGenerator(key, model=task.model, api_base_url=task.base_url, max_retries=0)
    tool = create_tool_from_function(calculator_of(tools))
    agent = Agent(chat_generator=model, tools=[tool], system_prompt=BRIEF)
    done = await agent.run_async(messages=[ChatMessage.from_user(task.prompt)])
    return str(done["last_message"].text)


async def strands(task: AgentTask, client: object, tools: Toolbox) -> str:
    """Run an agent of Strands Agents."""
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    model, made = OpenAIModel(client_args=server_of(task), model_id=task.model), tool(calculator_of(tools))
    agent = Agent(model, tools=[made], system_prompt=BRIEF, callback_handler=None)
    return str(await agent.invoke_async(task.prompt)).strip()


async def google_adk(task: AgentTask, client: object, tools: Toolbox) -> str:
    """Run an agent of Google's Agent Development Kit, which asks by LiteLLM."""
    from google.adk.agents import LlmAgent
    from google.adk.models.lite_llm import LiteLlm
    from google.adk.runners import InMemoryRunner
    from google.genai import types

    model = LiteLlm(f"openai/{task.model}", api_base=task.base_url, api_key=task.api_key)
    agent = LlmAgent(name="calculating", model=model, instruction=BRIEF, tools=[calculator_of(tools)])
    runner = InMemoryRunner(agent, app_name="sums")
    session = await runner.session_service.create_session(app_name="sums", user_id="me")
    said = ""
    asked = types.Content(role="user", parts=[types.Part(text=task.prompt)])
    async for event in runner.run_async(user_id="me", session_id=session.id, new_message=asked):
        if event.is_final_response() and event.content and event.content.parts:
            said = "".join(part.text or "" for part in event.content.parts)
    return said


async def dspy(task: AgentTask, client: object, tools: Toolbox) -> str:
    """Run a ReAct agent of DSPy, which writes each step as a question of its own."""
    from dspy import LM, ReAct, context

    model = LM(f"openai/{task.model}", api_base=task.base_url, api_key=task.api_key, cache=False, num_retries=0)
    with context(lm=model):
        done = await ReAct("question -> answer", tools=[calculator_of(tools)], max_iters=3).acall(question=task.prompt)
    return str(done.answer)


async def instructor(task: AgentTask, client: AsyncOpenAI, tools: object, *, mode: str = "TOOLS") -> str:
    """Ask for a structured answer with Instructor: as a call, or as JSON with `response_format`."""
    from instructor import Mode, from_openai

    asking: Any = from_openai(client, mode=Mode[mode]).chat.completions
    messages = [{"role": "user", "content": task.prompt}]
    return str((await asking.create(model=task.model, messages=messages, response_model=Sum, max_retries=1)).answer)


async def smolagents(
    task: AgentTask, client: object, tools: object, *, kind: str = "ToolCallingAgent", streams: bool = False
) -> str:
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
    made: Any = {"tools": [add], "model": library.OpenAIModel(task.model, **asks), "stream_outputs": streams}
    agent = getattr(library, kind)(max_steps=4, verbosity_level=-1, **made)
    return str(await asyncio.to_thread(agent.run, task.prompt))
