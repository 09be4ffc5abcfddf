"""Agents of users, written against OpenAI's client."""

import asyncio
import json
from typing import Any

from tasks.agents.faults import PolicyError

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


def question(task: Any) -> list[Any]:
    return [{"role": "user", "content": task.prompt}]


async def ask(task: Any, client: Any, **more: Any) -> Any:
    return await client.chat.completions.create(model=task.model, messages=question(task), **more)


async def silent(task: Any, client: Any, tools: Any) -> None:
    """Never ask."""


async def never_ends(task: Any, client: Any, tools: Any) -> None:
    """Ask, and then wait for ever."""
    await ask(task, client)
    await asyncio.sleep(10**6)


async def several_and_gives_up(task: Any, client: Any, tools: Any) -> None:
    """Give up after several completions, and a branch, before any of three answers."""
    task.num_answers = 3
    answer = await ask(task, client, n=3)
    messages = [*question(task), answer.choices[0].message, {"role": "user", "content": "Sure?"}]
    await client.chat.completions.create(model=task.model, messages=messages)
    raise PolicyError("it makes no move")


async def raises(task: Any, client: Any, tools: Any, *, kind: str) -> None:
    """Fail after a completion, or try to end the process."""
    await ask(task, client)
    raise {"exit": SystemExit(3), "lost": LookupError("lost the thread")}[kind]


async def returns(task: Any, client: Any, tools: Any, *, what: object) -> object:
    """Return something that is no answer."""
    await ask(task, client)
    return what


async def floods(task: Any, client: Any, tools: Any) -> None:
    """Ask without end, and often at once, whatever the endpoint says."""
    while True:
        await asyncio.gather(*(ask(task, client) for _ in range(30)), return_exceptions=True)


async def fills_the_context(task: Any, client: Any, tools: Any) -> None:
    """Go on until the context is full."""
    messages = question(task)
    while True:
        answer = await client.chat.completions.create(model=task.model, messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "Try again. " * 5}]


async def tells_what_it_sees(task: Any, client: Any, tools: Any) -> str:
    """Ask with the messages of the task, and with what is in the problem: prompts are recorded."""
    seen = {"prompt": task.prompt, "metadata": json.loads(task.problem.metadata), "solutions": task.problem.solutions}
    messages = [*task.messages[:-1], {"role": "user", "content": f"{task.messages[-1]['content']} {json.dumps(seen)}"}]
    completion = await client.chat.completions.create(model=task.model, messages=messages)
    return str(completion.choices[0].message.content)
