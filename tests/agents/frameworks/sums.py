"""Environments of the package verifiers about one sum, of each of its kinds."""

from typing import Any

import verifiers as vf
from datasets import Dataset

PARSER = vf.Parser()


def right(completion: Any, answer: str) -> float:
    return float(f"{{{answer}}}" in (PARSER.parse_answer(completion) or ""))


def short(completion: Any) -> float:
    return float(len(completion) < 5)


def group(completions: list[Any]) -> list[float]:
    return [float(len(completion)) for completion in completions]


def add(first: int, second: int) -> int:
    """Add two numbers.

    Args:
        first: a number.
        second: a number.
    """
    return first + second


class Retries(vf.MultiTurnEnv):
    """It says that the first answer is wrong."""

    async def env_response(self, messages: Any, state: Any, **more: Any) -> Any:
        return [{"role": "user", "content": "Wrong. Try again."}]


def load_environment(kind: str = "single") -> vf.Environment:
    """Return an environment: `single` turn, with a `tool`, of `two` turns, or with rewards for a `group`."""
    rubric = vf.Rubric(
        funcs=[group] if kind == "group" else [right, short], weights=[1.0] if kind == "group" else [1, 0.5]
    )
    dataset = Dataset.from_list([{"question": "What is 1 + 2?", "answer": "3"}])
    asked: dict[str, Any] = {"dataset": dataset, "rubric": rubric, "system_prompt": "Be brief."}
    if kind == "tool":
        return vf.ToolEnv(tools=[add], **asked)
    return Retries(max_turns=2, **asked) if kind == "two" else vf.SingleTurnEnv(**asked)
