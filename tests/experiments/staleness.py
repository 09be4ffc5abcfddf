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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tasks.evaluation.history import Evaluation, History

STALENESS = 4
_STALE = [f"rollout.policy_lag={STALENESS}", f"rollout.max_head_offpolicyness={STALENESS}"]
ARMS: dict[str, list[str]] = {
    "synchronous": [],
    f"staleness {STALENESS}, decoupled": _STALE,
    f"staleness {STALENESS}, plain PPO": [*_STALE, "ppo.use_decoupled_loss=false"],
    "synchronous, critic + GAE": [
        "ppo.advantage={type: gae, normalisation: batch}",
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

    def first_turn(self, evaluation: "Evaluation") -> float:
        """Share of the held-out problems that were right at the first turn."""
        return fmean(outcome.first for outcome in evaluation.outcomes)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.experiments.staleness", description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=60, help="updates of each run (default 60)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default 1 2 3")
    parser.add_argument("--root", default="./var/experiments/staleness", help="where the runs and the results go")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    results = [run(arm, seed, arguments.iterations, arguments.root) for seed in arguments.seeds for arm in ARMS]
    folder = Path(arguments.root)
    text = report(results, arguments.iterations)
    (folder / "staleness.md").write_text(text)
    plot(results, folder / "staleness.png")
    print(text)
    print(f"in {folder}: staleness.md, staleness.png")


def run(arm: str, seed: int, iterations: int, root: str) -> Result:
    """Run the flow, or continue it, and read back what it committed."""
    from configs import load
    from flows.math_mt_ppo import math_mt_ppo
    from storage import layout
    from storage.store import Store
    from tasks.evaluation.history import read_history
    from tasks.rewards.scoring import scorer_fingerprint

    name = f"{list(ARMS).index(arm)}-seed{seed}"
    settings = [
        f"run.name={name}",
        f"run.seed={seed}",
        f"run.iterations={iterations}",
        f"storage.root={root}",
        f"storage.cache={root}/cache",
        *ARMS[arm],
    ]
    if name[0] != "0":  # begin as the first arm did
        settings.append(f"policy={{path: {root}/{layout.checkpoint(f'0-seed{seed}', 0)}}}")
    math_mt_ppo("demo", settings)
    config = load("demo", settings)
    scorer = scorer_fingerprint(config.score)
    return Result(arm, seed, read_history(Store(root), name, scorer, iterations, Path(config.storage.cache)))


def report(results: Sequence[Result], iterations: int) -> str:
    """A Markdown table: held-out first-turn accuracy after the last update, and what explains it."""
    seeds = sorted({result.seed for result in results})
    titles = ["arm", *(f"seed {seed}" for seed in seeds), "mean", "mean minus synchronous", *_EXPLAINING.values()]
    lines = [
        f"Held-out accuracy, first turn, greedy, after {iterations} updates",
        "",
        _line(titles),
        _line(["---"] * len(titles)),
    ]
    before = [_mean([r.first_turn(r.history.evaluations[0]) for r in results if r.seed == seed]) for seed in seeds]
    lines.append(_line(["before", *map(_number, before), _number(_mean(before)), "", *[""] * len(_EXPLAINING)]))
    base: float | None = None
    for arm in ARMS:
        mine = sorted((result for result in results if result.arm == arm), key=lambda result: result.seed)
        values = [result.first_turn(result.history.evaluations[-1]) for result in mine]
        mean = _mean(values)
        base = mean if base is None else base
        explained = [_number(_metric(mine, name)) for name in _EXPLAINING]
        lines.append(_line([arm, *map(_number, values), _number(mean), f"{mean - base:+.3f}", *explained]))
    return "\n".join(lines) + "\n"


_EXPLAINING = {
    "staleness/mean": "staleness",
    "proximal/mean_difference": "mean abs(proximal - behaviour)",
    "policy/clip_fraction": "clipped",
    "value/explained_variance": "explained variance",
}
"""Metrics of training, averaged over iterations and seeds, and their titles."""


def _metric(results: Sequence[Result], name: str) -> float | None:
    found: list[Any] = [i.train.get(name) for result in results for i in result.history.iterations]
    known = [value for value in found if value is not None]
    return fmean(known) if known else None


def _mean(values: Sequence[float]) -> float:
    return fmean(values)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


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
            {e.policy_version: result.first_turn(e) for e in result.history.evaluations}
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
