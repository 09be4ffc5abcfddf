"""A user's scorers, for tests of `score.type=tests.support.own_scorers:…`."""

import os
import sys
import time
from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from tasks.score.verdict import Answer, Verdict


def decides(answer: Answer) -> bool:
    """Only decide."""
    return bool(answer.text == answer.row["solutions"][0])


def rewards(answer: Answer, *, bonus: Annotated[float, Field(ge=0)] = 0.25) -> Verdict:
    """Give a reward with parts, by the problem's metadata."""
    right = answer.text == answer.metadata["gold"]
    return Verdict("correct" if right else "wrong", reward=right + bonus, parts={"gold": float(right), "bonus": bonus})


def misbehaves(answer: Answer) -> object:
    """Do what the text of the answer says."""
    misdeeds: dict[str, Callable[[], object]] = {
        "raise": lambda: answer.metadata["no such key"],
        "exit": lambda: sys.exit("enough"),
        "die": lambda: os._exit(1),
        "loop": _loop,
        "wait": _wait,
        "fill the memory": lambda: bytearray(2**34),
        "nan": lambda: Verdict("correct", reward=float("nan")),
        "infinite part": lambda: Verdict("correct", parts={"speed": float("inf")}),
        "half": lambda: 0.5,
        "strange name": lambda: Verdict("great"),  # type: ignore[arg-type]
        "rewarded call": lambda: Verdict("none", reward=1.0),
        "call": lambda: Verdict("none"),
        "surrogate": lambda: Verdict("wrong", extracted="\ud800" + "x" * 1000),
        "good": lambda: Verdict("correct", reward=2.0),
    }
    return misdeeds[answer.text]()


async def waits(answer: Answer) -> bool:
    return True


def takes_nothing() -> bool:
    return True


def _loop() -> None:
    while True:
        pass


def _wait() -> bool:
    time.sleep(3)
    return True


def shortest(answer: Answer) -> Verdict:
    """Pay the shortest right answer of a group half as much again."""
    right = answer.text.strip() == "3" or answer.text.endswith("so 3")
    lengths = [len(text) for row in answer.group if (text := row["turns"][-1]["text"]).endswith("3")]
    return Verdict("correct" if right else "wrong", reward=right + 0.5 * (right and len(answer.text) == min(lengths)))
