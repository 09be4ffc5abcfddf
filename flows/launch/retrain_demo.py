"""`make retrain-demo`: three nights in minutes on the tiny policy: promoted, promoted, rejected; then a rollback.

Night 1 brings problems, night 2 more problems, night 3 repeats some of these with wrong gold answers. Nothing is
simulated: the demo runs the flow `retrain` with its log, gate and alias, in ./var. If it is killed, the same command
continues it.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from configs.problems import ArithmeticSource
from flows.launch.cli import ADVICE, status
from flows.launch.temporary_server import temporary_server
from flows.retrain import retrain
from flows.run.configuration import resolve
from storage import interrupts
from storage.commands.program import Parser
from storage.objects.store import Store
from storage.versions import aliases
from tasks.problems.generated import generate
from tasks.retrain.commands import explain, nights, roll_back

NAME = "retrain-demo"
FOLDER = Path("var") / NAME
_FIRST, _POISONED = 400, 200
"""Number of new problems in night 1, and in night 3."""
SETTINGS = [f"run.name={NAME}", f"retrain.champion={NAME}/champion", f"problems.train.path={FOLDER}/*.jsonl"]


def demo(overrides: Sequence[str]) -> None:
    """Run the nights and the rollback with dotted overrides."""
    config = resolve("retrain", overrides)
    FOLDER.mkdir(parents=True, exist_ok=True)
    source = ArithmeticSource(kind="arithmetic")
    problems = [(problem.prompt, int(problem.solutions[0])) for problem in generate(source)]
    wrong = [(prompt, answer + 1) for prompt, answer in problems[-_POISONED:]]
    # So many iterations that the gains of the first two nights show on 200 held-out problems.
    arrivals = [("the first problems", problems[:_FIRST], 45), ("more problems", problems[_FIRST:], 110)]
    arrivals.append(("wrong gold answers", wrong, 30))
    with temporary_server():
        for number, (title, arrived, iterations) in enumerate(arrivals, 1):
            print(f"\n=== night {number}: {title}\n", flush=True)
            lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in arrived]
            (FOLDER / f"night-{number}.jsonl").write_text("\n".join(lines) + "\n")
            print(f"night {number}: {retrain('retrain', [f'run.iterations={iterations}', *overrides])}")
    print("\n=== reasons of the last night's decision: python -m flows.retrain retrain … --explain\n", flush=True)
    print(explain(config))
    print("\n=== rollback of the last promotion: python -m flows.retrain retrain … --roll-back\n", flush=True)
    last = aliases.history(Store(config.storage.root), f"{NAME}/champion")[-1]
    if not last.reason.startswith("roll back"):  # a demo that was killed here has rolled back already
        print(roll_back(config))
    print(nights(config))


if __name__ == "__main__":
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides: run.iterations=10")
    given = [*SETTINGS, *parser.parse_args().overrides]
    interrupts.run(lambda: status(lambda: demo(given), verbose=False), ADVICE)
