"""Structured answers by Instructor: as a call of a tool, and as JSON."""

import instructor
from openai import AsyncOpenAI
from pydantic import BaseModel

from tasks.agents.endpoint.agent import AgentTask


class Sum(BaseModel):
    """The answer to a question."""

    answer: str


async def ask(task: AgentTask, client: AsyncOpenAI, mode: instructor.Mode) -> str:
    asking = instructor.from_openai(client, mode=mode)
    messages = [{"role": "user", "content": task.prompt}]
    done = await asking.chat.completions.create(model=task.model, messages=messages, response_model=Sum, max_retries=1)
    return str(done.answer)


async def solve(task: AgentTask, client: AsyncOpenAI, tools: object) -> str:
    """Ask for a call."""
    return await ask(task, client, instructor.Mode.TOOLS)


async def solve_with_json(task: AgentTask, client: AsyncOpenAI, tools: object) -> str:
    """Ask for JSON, with `response_format`."""
    return await ask(task, client, instructor.Mode.JSON)
