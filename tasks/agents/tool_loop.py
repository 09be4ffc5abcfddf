"""The agent that calls tools until it has an answer, written against OpenAI's client as users write theirs."""

from typing import Any

from openai import AsyncOpenAI

from tasks.agents.endpoint.agent import AgentTask
from tasks.problems.rows import with_instructions
from tasks.tools.toolbox import Toolbox


async def solve(
    task: AgentTask,
    client: AsyncOpenAI,
    tools: Toolbox,
    *,
    num_turns: int = 1,
    most_calls: int = 8,
    wrong_feedback: str = "Your answer is wrong. Try again.",
    system_prompt: str = "",
    instruction: str = "",
) -> None:
    """Ask the policy; run the tools that it calls; give the environment what it says without a call.

    Args:
        task: the episode.
        client: asks the policy.
        tools: what the policy may call; with none this is the agent `math-multi-turn`.
        num_turns: most answers; after a wrong one the environment's observation is sent, or `wrong_feedback`.
        most_calls: most completions with calls; the next one is taken as an answer.
        wrong_feedback: user message after a wrong answer to which the environment says nothing.
        system_prompt: first message, if not empty; a problem's own system message follows in the same message.
        instruction: appended to the problem's text.
    """
    messages: list[Any] = [*with_instructions(task.messages, system_prompt, instruction)]
    offered: dict[str, Any] = {"tools": tools.schemas} if tools.schemas else {}
    task.num_answers, answers, calls = num_turns, 0, 0
    while answers < num_turns:
        completion = await client.chat.completions.create(model=task.model, messages=messages, **offered)
        message = completion.choices[0].message
        messages.append(message)
        if message.tool_calls and calls < most_calls:
            calls += 1
            messages += await tools.results(message.tool_calls)
            continue
        answers += 1
        step = await task.step(message.content or "")
        if step.terminated or step.truncated:
            return
        messages.append({"role": "user", "content": step.observation or wrong_feedback})
