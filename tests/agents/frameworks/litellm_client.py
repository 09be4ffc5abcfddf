"""An agent of LiteLLM's client: ask, call tools, ask again."""

from typing import Any

import litellm

from tasks.agents.endpoint.agent import AgentTask
from tasks.tools.toolbox import Toolbox


async def solve(task: AgentTask, client: object, tools: Toolbox) -> str:
    """Call tools until the policy answers."""
    messages: list[Any] = [{"role": "user", "content": task.prompt}]
    while True:
        completion = await litellm.acompletion(
            f"openai/{task.model}", messages, tools=tools.schemas, base_url=task.base_url, api_key=task.api_key
        )
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return str(message.content)
        messages += await tools.results(message.tool_calls)
