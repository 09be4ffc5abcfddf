"""An agent of the plain OpenAI client: ask, call tools, ask again."""

from typing import Any

from openai import AsyncOpenAI

from tasks.agents.endpoint.agent import AgentTask
from tasks.tools.toolbox import Toolbox


async def solve(task: AgentTask, client: AsyncOpenAI, tools: Toolbox) -> str:
    """Call tools until the policy answers."""
    messages: list[Any] = [{"role": "developer", "content": "Use the calculator."}]
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


async def solve_in_a_stream(task: AgentTask, client: AsyncOpenAI, tools: Toolbox) -> str:
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
