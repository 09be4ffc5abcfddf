"""Agents of smolagents: one that calls tools and one that writes code. They are synchronous, so they run in threads."""

import asyncio
from typing import Any

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

from tasks.agents.endpoint.agent import AgentTask


@tool
def add(first: int, second: int) -> int:
    """Add two numbers.

    Args:
        first: a number.
        second: a number.
    """
    return first + second


def run(kind: type[Any], task: AgentTask, **more: Any) -> str:
    """Run an agent until it gives its final answer."""
    model = OpenAIModel(task.model, api_base=task.base_url, api_key=task.api_key, client_kwargs={"max_retries": 0})
    agent = kind(tools=[add], model=model, max_steps=4, verbosity_level=-1, **more)
    return str(agent.run(task.prompt))


async def solve(task: AgentTask, client: object, tools: object) -> str:
    """Call tools."""
    return await asyncio.to_thread(run, ToolCallingAgent, task)


async def solve_in_a_stream(task: AgentTask, client: object, tools: object) -> str:
    """Call tools, and read streams."""
    return await asyncio.to_thread(run, ToolCallingAgent, task, stream_outputs=True)


async def solve_with_code(task: AgentTask, client: object, tools: object) -> str:
    """Write code."""
    return await asyncio.to_thread(run, CodeAgent, task)
