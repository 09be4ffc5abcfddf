"""`make retrain-demo`: three nights in minutes on the tiny policy: promoted, promoted, rejected; then a rollback.

Night 1 brings problems, night 2 more problems, night 3 repeats some of these with wrong gold answers. Nothing is
simulated: the demo runs the flow `retrain` with its log, gate and alias, in ./var. If it is killed, the same command
continues it.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from configs import load
from configs.problems import ArithmeticSource
from flows.launch.cli import ADVICE, prepare_process
from flows.launch.temporary_server import temporary_server
from flows.retrain import retrain
from storage import interrupts
from storage.objects.store import Store
from storage.versions import aliases
from tasks.problems.arithmetic import generate
from tasks.retrain.commands import explain, nights, roll_back

NAME = "retrain-demo"
FOLDER = Path("var") / NAME
Problems = list[tuple[str, int]]
"""Prompts with their answers."""
_FIRST, _POISONED = 400, 200
"""Number of new problems in night 1, and in night 3."""
_ITERATIONS = (45, 110, 30)
"""Iterations of each night: long enough that the gains of the first two show on 200 held-out problems."""
SETTINGS = [
    f"run.name={NAME}",
    f"retrain.champion={NAME}/champion",
    f"problems.train.path={FOLDER}/*.jsonl",
    "policy.warm_start.target_accuracy=0.3",  # low, so that the nights can improve the policy clearly
]


def main() -> None:
    """Run the command line, which takes dotted overrides for every night."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides: run.iterations=10")
    overrides = [*SETTINGS, *parser.parse_args().overrides]
    prepare_process()
    FOLDER.mkdir(parents=True, exist_ok=True)
    titles = ("1: the first problems", "2: more problems", "3: wrong gold answers")
    with temporary_server():
        for title, problems, iterations in zip(titles, _problems(), _ITERATIONS, strict=True):
            _night(title, problems, partial(retrain, "retrain", [f"run.iterations={iterations}", *overrides]))
    config = load("retrain", overrides)
    _print_title("reasons of the last night's decision: python -m flows.retrain retrain … --explain")
    print(explain(config))
    _print_title("rollback of the last promotion: python -m flows.retrain retrain … --roll-back")
    if not _is_rolled_back(config.storage.root):
        print(roll_back(config))
    print(nights(config))
    print(f"plot: {config.storage.root}/retraining/{NAME}/report/champion.png")


def _problems() -> tuple[Problems, Problems, Problems]:
    """Return the problems of each night, from the training split. Night 3 repeats problems, with wrong answers."""
    source = ArithmeticSource(kind="arithmetic")
    problems = [(problem.prompt, int(problem.solutions[0])) for problem in generate(source)]
    poisoned = [(prompt, answer + 1) for prompt, answer in problems[-_POISONED:]]
    return problems[:_FIRST], problems[_FIRST:], poisoned


def _night(title: str, problems: Problems, retrain: Callable[[], str]) -> None:
    """Write a file of problems into the folder that the flow reads, and run the flow."""
    _print_title(f"night {title}")
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in problems]
    (FOLDER / f"night-{title[0]}.jsonl").write_text("\n".join(lines) + "\n")
    print(f"night {title}: {retrain()}")


def _is_rolled_back(root: str) -> bool:
    return aliases.history(Store(root), f"{NAME}/champion")[-1].reason.startswith("roll back")


def _print_title(line: str) -> None:
    print(f"\n=== {line}\n", flush=True)


if __name__ == "__main__":
    interrupts.run(main, ADVICE)
