"""Does staleness hurt, does the decoupled objective help, and is a critic better than a group baseline?

python -m tests.experiments.staleness                 four arms, three seeds, 60 updates each: 40 minutes on 2 cores
python -m tests.experiments.staleness --iterations 2  a try

Every arm of a seed begins with the same policy and makes the same number of updates on as many episodes. The runs are
ordinary runs of the demo with overrides, so what is committed is not done again. Writes staleness.md and staleness.png.
"""

import argparse
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.evaluation.history import History

STALENESS = 4
_STALE = [f"rollout.policy_lag={STALENESS}", f"rollout.max_head_offpolicyness={STALENESS}"]
ARMS: dict[str, list[str]] = {
    "synchronous": [],
    f"staleness {STALENESS}, decoupled": _STALE,
    f"staleness {STALENESS}, plain PPO": [*_STALE, "ppo.use_decoupled_loss=false"],
    "synchronous, critic + GAE": [
        "ppo.advantage={type: gae, normalisation: none}",
        "ppo.critic={model: own, lr: 1.0e-3}",
    ],
}
_COLORS = ("tab:blue", "tab:green", "tab:red", "tab:purple")


@dataclass(frozen=True, slots=True)
class Result:
    """One run."""

    arm: str
    seed: int
    history: "History"

    def first_turns(self, place: int) -> list[float]:
        """Success at the first turn of each held-out problem, in the evaluation at `place`."""
        outcomes = sorted(self.history.evaluations[place].outcomes, key=lambda outcome: outcome.problem_id)
        return [outcome.first for outcome in outcomes]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.experiments.staleness", description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=60, help="updates of each run (default 60)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default 1 2 3")
    parser.add_argument("--root", default="./var/experiments/staleness", help="where the runs and the results go")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    from flows.math_mt_ppo import math_mt_ppo

    runs = [(arm, seed) for seed in arguments.seeds for arm in ARMS]
    for arm, seed in runs:
        math_mt_ppo("demo", settings(arm, seed, arguments.iterations, arguments.root))
    results = [read(arm, seed, arguments.iterations, arguments.root) for arm, seed in runs]
    folder, text = Path(arguments.root), report(results)
    (folder / "staleness.md").write_text(text)
    plot(results, folder / "staleness.png")
    print(text)
    print(f"in {folder}: staleness.md, staleness.png")


def settings(arm: str, seed: int, iterations: int, root: str) -> list[str]:
    """Overrides of the demo; every arm of a seed begins with the policy of its first."""
    from storage import layout

    first = f"{root}/{layout.checkpoint(name_of(next(iter(ARMS)), seed), 0)}"
    return [
        f"run.name={name_of(arm, seed)}",
        f"run.seed={seed}",
        f"run.iterations={iterations}",
        f"storage.root={root}",
        f"storage.cache={root}/cache",
        *([] if arm == next(iter(ARMS)) else [f"policy={{path: {first}}}"]),
        *ARMS[arm],
    ]


def name_of(arm: str, seed: int) -> str:
    return f"{list(ARMS).index(arm)}-seed{seed}"


def read(arm: str, seed: int, iterations: int, root: str) -> Result:
    """What a run has committed."""
    from configs import load
    from storage import layout
    from storage.store import Store
    from tasks.evaluation.history import read_history
    from tasks.problems import fingerprint, load_problems
    from tasks.rewards.scoring import scorer_fingerprint

    config = load("demo", settings(arm, seed, iterations, root))
    held_out = layout.problems(fingerprint(load_problems(config.problems.held_out, 0.0).problems))
    scorer, cache = scorer_fingerprint(config.score), Path(config.storage.cache)
    return Result(arm, seed, read_history(Store(root), config, scorer, held_out, cache))


def report(results: Sequence[Result]) -> str:
    """A Markdown table: held-out first-turn accuracy after the last update, and what may explain it."""
    seeds, first = sorted({result.seed for result in results}), next(iter(ARMS))
    updates = len(results[0].history.iterations)
    titles = ["arm", *(f"seed {seed}" for seed in seeds), "mean", f"difference to {first}", *EXPLAINING.values()]
    lines = [
        f"Held-out accuracy, first turn, greedy, after {updates} updates; differences paired by problem and seed.",
        "",
    ]
    lines += [_line(titles), _line(["---"] * len(titles))]
    base = [result for result in results if result.arm == first]
    lines.append(_row("before", base, 0, ""))
    for arm in ARMS:
        mine = [result for result in results if result.arm == arm]
        lines.append(_row(arm, mine, -1, "" if arm == first else _difference(base, mine)))
    return "\n".join(lines) + "\n"


EXPLAINING = {
    "staleness/mean": "staleness",
    "proximal/mean_difference": "mean of abs(proximal - behaviour)",
    "policy/clip_fraction": "clipped",
    "value/explained_variance": "explained variance",
}
"""Metrics of training, averaged over updates and seeds, and their titles."""


def _row(title: str, results: Sequence[Result], place: int, difference: str) -> str:
    values = [fmean(result.first_turns(place)) for result in results]
    explaining = [_metric(results, name) if place else "" for name in EXPLAINING]
    return _line([title, *(f"{value:.3f}" for value in values), f"{fmean(values):.3f}", difference, *explaining])


def _difference(base: Sequence[Result], results: Sequence[Result]) -> str:
    from tasks.evaluation.statistics import paired_difference

    before, after = ([v for result in some for v in result.first_turns(-1)] for some in (base, results))
    estimate = paired_difference(before, after)
    return f"{estimate.value:+.3f} [{estimate.low:+.3f}, {estimate.high:+.3f}]"


def _metric(results: Sequence[Result], name: str) -> str:
    values = [i.train[name] for result in results for i in result.history.iterations if name in i.train]
    return f"{fmean(values):.3f}" if values else ""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def plot(results: Sequence[Result], path: Path) -> None:
    """Accuracy over updates: a thin line for each seed, a thick one for their mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for arm, color in zip(ARMS, _COLORS, strict=True):
        curves = [
            {e.policy_version: fmean(result.first_turns(n)) for n, e in enumerate(result.history.evaluations)}
            for result in results
            if result.arm == arm
        ]
        versions = sorted(curves[0])
        for curve in curves:
            axes.plot(versions, [curve[v] for v in versions], color=color, linewidth=1, alpha=0.3)
        axes.plot(versions, [fmean(curve[v] for curve in curves) for v in versions], color=color, marker="o", label=arm)
    axes.set(xlabel="updates", ylabel="held-out accuracy, first turn", title="Staleness and baselines")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
