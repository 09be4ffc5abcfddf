"""`make retrain-demo`: three nights in minutes on the tiny policy: promoted, promoted, rejected; then a roll-back.

Night 1 brings problems, night 2 more of them, night 3 some of these again with wrong gold answers.
Everything is the real thing: the flow `retrain` with its log, gate and alias, in ./var. Killed and started again it
goes on.
"""

import argparse
import json
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from configs import load
from flows.launch.cli import ADVICE
from flows.launch.temporary_server import temporary_server
from storage import interrupts

NAME = "retrain-demo"
FOLDER = Path("var") / NAME
Problems = list[tuple[str, int]]
"""Prompts and answers."""
_FIRST, _POISONED = 400, 200
"""Problems that come in night 1, and in night 3."""
_ITERATIONS = (45, 110, 30)
"""Length of each night: long enough that the gains of the first two show on 200 held-out problems."""
SETTINGS = [
    f"run.name={NAME}",
    f"retrain.champion={NAME}/champion",
    f"problems.train.path={FOLDER}/*.jsonl",
    "policy.warm_start.target_accuracy=0.3",  # leaves the nights much to learn
]


def main() -> None:
    """Command line: dotted overrides for every night."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides: run.iterations=10")
    overrides = [*SETTINGS, *parser.parse_args().overrides]
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    from flows.retrain import retrain
    from tasks.retrain.commands import explain, nights, roll_back

    FOLDER.mkdir(parents=True, exist_ok=True)
    titles = ("1: the first problems", "2: more problems", "3: wrong gold answers")
    with temporary_server():
        for title, problems, iterations in zip(titles, _problems(), _ITERATIONS, strict=True):
            _night(title, problems, partial(retrain, "retrain", [f"run.iterations={iterations}", *overrides]))
    config = load("retrain", overrides)
    _say("why the last night was decided so: python -m flows.retrain retrain … --explain")
    print(explain(config))
    _say("the last promotion is undone: python -m flows.retrain retrain … --roll-back")
    if not _is_rolled_back(config.storage.root):
        print(roll_back(config))
    print(nights(config))
    print(f"plot: {config.storage.root}/retraining/{NAME}/report/champion.png")


def _problems() -> tuple[Problems, Problems, Problems]:
    """The problems of each night, from the training split. Those of the third came before, with right answers."""
    from configs.schema import ArithmeticSource
    from tasks.problems.arithmetic import generate

    every = [(each.prompt, int(each.solutions[0])) for each in generate(ArithmeticSource(kind="arithmetic"))]
    poisoned = [(prompt, answer + 1) for prompt, answer in every[-_POISONED:]]
    return every[:_FIRST], every[_FIRST:], poisoned


def _night(title: str, problems: Problems, retrain: Callable[[], str]) -> None:
    """Drop a file of problems where the flow looks for them, and run it."""
    _say(f"night {title}")
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in problems]
    (FOLDER / f"night-{title[0]}.jsonl").write_text("\n".join(lines) + "\n")
    print(f"night {title}: {retrain()}")


def _is_rolled_back(root: str) -> bool:
    from storage.objects.store import Store
    from storage.versions import aliases

    return aliases.history(Store(root), f"{NAME}/champion")[-1].reason.startswith("roll back")


def _say(line: str) -> None:
    print(f"\n=== {line}\n", flush=True)


if __name__ == "__main__":
    interrupts.run(main, ADVICE)
