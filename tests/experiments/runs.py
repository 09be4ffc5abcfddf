"""Runs of a demo in several arms and seeds, with their table: the common part of the experiments.

All arms of a seed begin with the same policy and make the same number of updates on the same number of episodes. The
runs are ordinary runs with overrides, so committed work is not done again.
"""

import argparse
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

from flows.launch.cli import share_cores
from flows.launch.temporary_server import temporary_server
from storage import interrupts

SEED, LAST = "$SEED", "$LAST"
"""Stand in the overrides of an arm for the seed of the run and its number of updates."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train, with its overrides.

    Example: Arm("stream, staleness 4", ["run.overlap=true", "rollout.max_head_offpolicyness=4"])
    """

    name: str
    overrides: Sequence[str] = ()
    around: Callable[[], AbstractContextManager[None]] = nullcontext  # a context manager that is active during its runs


@dataclass(frozen=True, slots=True)
class Result:
    """The numbers of one run."""

    arm: str
    seed: int
    numbers: dict[str, Any]  # of its report
    first_turns: list[list[float]]  # of the first and the last evaluation: the success of each held-out problem


@dataclass(frozen=True, slots=True)
class Experiment:
    """Arms that are compared with the first of them.

    Example: Experiment("control", [Arm("verdicts"), Arm("coin flips", around=coin_flips)], 100)
    """

    name: str
    arms: Sequence[Arm]
    iterations: int  # updates of each run
    explaining: Mapping[str, str] = field(default_factory=dict)
    """Training metrics that may explain the result, averaged over updates and seeds, and their titles."""
    config: str = "demo"

    def main(self, description: str) -> NoReturn:
        """Run the command line."""
        interrupts.run(lambda: self._main(description), "the same command continues from the committed versions")

    def _main(self, description: str) -> None:
        program = f"python -m tests.experiments.{self.name}"
        parser = argparse.ArgumentParser(prog=program, description=description)
        updates = f"updates of each run (default {self.iterations})"
        parser.add_argument("--iterations", type=int, default=self.iterations, help=updates)
        parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default 1 2 3")
        place = f"./var/experiments/{self.name}"
        parser.add_argument("--root", default=place, help=f"where the runs and the results go (default {place})")
        arguments = parser.parse_args()
        share_cores()
        logging.getLogger("httpx").setLevel(logging.WARNING)
        with temporary_server():
            each = product(arguments.seeds, self.arms)
            results = [self._run(arm, seed, arguments.iterations, arguments.root) for seed, arm in each]
        folder, text = Path(arguments.root), self.report(results)
        (folder / f"{self.name}.md").write_text(text)
        print(text)
        print(f"in {folder}/{self.name}.md")

    def settings(self, arm: Arm, seed: int, iterations: int, root: str) -> list[str]:
        """Return the overrides of a run; every arm of a seed begins with the policy of the first arm.

        The tiny policy of a demo is taught anew for each seed but 1, which has taught the one in this repository.
        """
        from storage import layout

        taught = taught_policy(self.config, seed, Path(root))
        first = f"{root}/{layout.checkpoint(self._name(self.arms[0], seed), 0)}"
        return [
            f"run.name={self._name(arm, seed)}",
            f"run.seed={seed}",
            f"run.iterations={iterations}",
            f"storage.root={root}",
            f"storage.cache={root}/cache",
            *([f"policy.path={taught}"] if taught else []),
            *([] if arm is self.arms[0] else [f"policy.path={first}"]),
            *(override.replace(SEED, str(seed)).replace(LAST, str(iterations)) for override in arm.overrides),
        ]

    def _name(self, arm: Arm, seed: int) -> str:
        return f"{self.arms.index(arm)}-seed{seed}"

    def _run(self, arm: Arm, seed: int, iterations: int, root: str) -> Result:
        from configs import load
        from flows.math_mt_ppo import math_mt_ppo
        from storage import layout
        from storage.objects.store import Store
        from storage.version_names import ScoresVersion
        from tasks.evaluate.learning_curve import summary
        from tasks.evaluate.outcomes import read_outcomes
        from tasks.inference.location import model_fingerprints
        from tasks.problems import fingerprint, load_problems
        from tasks.score.scoring import scorer_fingerprint

        settings = self.settings(arm, seed, iterations, root)
        with arm.around():
            math_mt_ppo(self.config, settings)
        config = load(self.config, settings)
        held_out = layout.problems(fingerprint(load_problems(config.problems.evaluated[0].source, 0.0).problems))
        scorer, cache = scorer_fingerprint(config.score, model_fingerprints(config)), Path(config.storage.cache)
        store = Store(root)
        numbers = summary(store, config, scorer, held_out, cache)
        first, *_, last = (ScoresVersion(each["scores"][0]) for each in numbers["evaluations"])
        ends = [[outcome.first for outcome in read_outcomes(store, scores, cache)] for scores in (first, last)]
        return Result(arm.name, seed, numbers, ends)

    def report(self, results: Sequence[Result]) -> str:
        """Write a Markdown table of the held-out first-turn accuracy after the last update and explaining metrics."""
        seeds, first = sorted({result.seed for result in results}), self.arms[0].name
        updates = len(results[0].numbers["training"])
        seen = [f"seed {seed}" for seed in seeds]
        titles = ["arm", *seen, "mean", f"difference to {first}", *self.explaining.values()]
        about = f"Held-out accuracy, first turn, greedy, after {updates} updates"
        base = [result for result in results if result.arm == first]
        rows = [titles, ["---"] * len(titles), _row("before", base, 0, "", self.explaining)]
        for arm in self.arms:
            of_arm = [result for result in results if result.arm == arm.name]
            difference = "" if of_arm == base else _difference(base, of_arm)
            rows.append(_row(arm.name, of_arm, -1, difference, self.explaining))
        return f"{about}; differences paired by problem and seed.\n\n{markdown(rows)}"


def taught_policy(config: str, seed: int, root: Path) -> Path | None:
    """Return the folder of the policy that a seed taught, and teach it if it is not there; None: that of `config`."""
    from tests.experiments.teach import RECIPES, make_policy

    if seed == 1 or config not in RECIPES:
        return None
    folder = root / f"policies/{config}-seed{seed}"
    if not (folder / "model.safetensors").is_file():
        make_policy(*RECIPES[config], seed, folder)
    return folder


def _row(title: str, results: Sequence[Result], place: int, difference: str, explaining: Iterable[str]) -> list[str]:
    values = [fmean(result.first_turns[place]) for result in results]
    metrics = [_metric(results, name) if place else "" for name in explaining]
    return [title, *(f"{value:.3f}" for value in values), f"{fmean(values):.3f}", difference, *metrics]


def _difference(base: Sequence[Result], results: Sequence[Result]) -> str:
    from tasks.evaluate.statistics import paired_difference

    before, after = ([v for result in some for v in result.first_turns[-1]] for some in (base, results))
    estimate = paired_difference(before, after)
    return f"{estimate.value:+.3f} [{estimate.low:+.3f}, {estimate.high:+.3f}]"


def _metric(results: Sequence[Result], name: str) -> str:
    values = [row[name] for result in results for row in result.numbers["training"] if name in row]
    return f"{fmean(values):.3f}" if values else ""


def markdown(rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
