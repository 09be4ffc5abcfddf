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


def question(task: Any) -> list[Any]:
    return [{"role": "user", "content": task.prompt}]


async def ask(task: Any, client: Any, **more: Any) -> Any:
    return await client.chat.completions.create(model=task.model, messages=question(task), **more)


async def is_of_a_framework(task: Any, client: Any, tools: Any) -> str:
    """Send what the clients of frameworks send: contents in parts, null, other roles, all kinds of settings."""
    add = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": True}}
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}, "index": 0}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Add."}]},
        {"role": "user", "content": task.prompt, "name": "someone"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None, "annotations": []},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "3"}]},
    ]
    settings = {"parallel_tool_calls": False, "store": False, "user": "me", "metadata": {"step": "1"}, "top_p": 0.9}
    settings |= {"stop": ["Observation:"], "temperature": 0.2, "frequency_penalty": 0, "reasoning_effort": "low"}
    answer = await client.chat.completions.create(
        model=task.model, messages=messages, tools=[add], tool_choice="required", **settings
    )
    assert answer.id
    assert answer.usage.prompt_tokens > 0
    return str(answer.choices[0].message.content)


async def silent(task: Any, client: Any, tools: Any) -> None:
    """Never ask."""


async def never_ends(task: Any, client: Any, tools: Any) -> None:
    """Ask, and then wait for ever."""
    import asyncio

    await ask(task, client)
    await asyncio.sleep(10**6)


async def several_and_gives_up(task: Any, client: Any, tools: Any) -> None:
    """Give up after several completions, and a branch."""
    from tasks.agents.faults import PolicyError

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
    import asyncio

    while True:
        await asyncio.gather(*(ask(task, client) for _ in range(30)), return_exceptions=True)


async def fills_the_context(task: Any, client: Any, tools: Any) -> None:
    """Go on until the context is full."""
    messages = question(task)
    while True:
        answer = await client.chat.completions.create(model=task.model, messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "Try again. " * 5}]
