"""What agents of a test see of their problem: it is said to the policy, whose prompts are recorded."""

import json
from typing import Any


async def solve(task: Any, client: Any, tools: Any) -> str:
    """Ask with the messages of the task, and with what is in the problem."""
    seen = {"prompt": task.prompt, "metadata": json.loads(task.problem.metadata), "solutions": task.problem.solutions}
    messages = [*task.messages[:-1], {"role": "user", "content": f"{task.messages[-1]['content']} {json.dumps(seen)}"}]
    completion = await client.chat.completions.create(model=task.model, messages=messages)
    return str(completion.choices[0].message.content)
