"""Agents of users, written against OpenAI's client."""

from typing import Any

WRONG = "Your answer is wrong. Try again."


async def two_turns(task: Any, client: Any, tools: Any) -> None:
    """Answer, and try once more if the environment says that it is wrong: `math-multi-turn` with two turns."""
    messages: list[Any] = [{"role": "user", "content": task.prompt}]
    for _ in range(2):
        answer = await client.chat.completions.create(model=task.model, messages=messages)
        step = await task.step(answer.choices[0].message.content or "")
        if step.terminated:
            return
        messages += [answer.choices[0].message, {"role": "user", "content": WRONG}]
