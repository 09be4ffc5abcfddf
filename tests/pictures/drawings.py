"""Two drawings: the stages with the versions between them, and where the time of an iteration goes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from storage import layout
from storage.objects.store import Store
from storage.version_names import ScoresVersion
from storage.versions import manifests
from tasks.metrics.rows import row_of

BLUE, GREEN, ORANGE, GREY = "#2f6f9f", "#3c8d5a", "#c9772e", "#8a8f98"
_ARROW: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 14}
_HEIGHT = 0.24
BOXES = (
    (0.42, 0.80, 0.18, "rollout", "async agents and vLLM", BLUE),
    (0.66, 0.80, 0.18, "score", "math-verify", GREEN),
    (0.90, 0.80, 0.18, "train", "PPO in torch", ORANGE),
    (0.12, 0.80, 0.20, "problems", "fingerprint", ""),
    (0.12, 0.30, 0.20, "policy n", "checkpoint, canary", ""),
    (0.42, 0.30, 0.20, "trajectories n", "Parquet", ""),
    (0.66, 0.30, 0.20, "scores n", "Parquet", ""),
    (0.90, 0.30, 0.18, "policy n+1", "checkpoint", ""),
)
"""Centre, width, title, the line below it, and the colour of a stage; a version has none."""


def draw_stages(path: Path) -> None:
    """Stages above, versions below: every arrow reads or commits a version."""
    figure = _figure(3.4)
    axes = figure.subplots()
    axes.set(xlim=(0, 1), ylim=(0.0, 1.0))
    axes.axis("off")
    for x, y, width, title, about, color in BOXES:
        corner, style = (x - width / 2, y - _HEIGHT / 2), "round,pad=0,rounding_size=0.02"
        looks: dict[str, Any] = {"facecolor": color or "white", "edgecolor": color or GREY, "lw": 1.4}
        axes.add_patch(FancyBboxPatch(corner, width, _HEIGHT, boxstyle=style, **looks))
        centred: dict[str, Any] = {"ha": "center", "va": "center", "color": "white" if color else "#222"}
        axes.text(x, y + 0.045, title, fontsize=12, weight="bold", **centred)
        axes.text(x, y - 0.06, about, fontsize=9, **centred)
    for start, end in (
        ((0.22, 0.80), (0.33, 0.80)),  # problems -> rollout
        ((0.17, 0.42), (0.345, 0.69)),  # policy n -> rollout
        ((0.42, 0.68), (0.42, 0.42)),  # rollout -> trajectories
        ((0.50, 0.42), (0.60, 0.68)),  # trajectories -> score
        ((0.66, 0.68), (0.66, 0.42)),  # score -> scores
        ((0.74, 0.42), (0.84, 0.68)),  # scores -> train
        ((0.90, 0.68), (0.90, 0.42)),  # train -> policy n+1
    ):
        axes.add_patch(FancyArrowPatch(start, end, color="#444", shrinkA=0, shrinkB=0, **_ARROW))
    back = FancyArrowPatch((0.90, 0.18), (0.12, 0.18), connectionstyle="arc3,rad=-0.10", color=GREY, ls="--", **_ARROW)
    axes.add_patch(back)
    axes.text(0.51, 0.045, "next iteration", ha="center", va="center", fontsize=9, color=GREY)
    _save(figure, path)


class Span(NamedTuple):
    """A stage of one iteration, in seconds since the first span began.

    Example: Span(iteration=41, stage="rollout", begin=0.0, seconds=0.62)
    """

    iteration: int
    stage: str
    begin: float
    seconds: float


COLORS = {"rollout": BLUE, "score": GREEN, "train": ORANGE}


def read_spans(store: Store, run: str, iterations: Sequence[int]) -> list[Span]:
    """When each stage of the iterations worked, from its manifest: the time of its commit, and how long it took."""
    spans = list[Span]()
    for iteration in iterations:
        update = manifests.read(store, layout.checkpoint(run, iteration + 1))
        (scores,) = (name for name in update.parent_names if ScoresVersion.is_place(name))
        played, judged = manifests.read(store, layout.trajectories(run, iteration)), manifests.read(store, scores)
        trained = row_of(update)
        assert trained
        took = played.metrics["seconds"], judged.metrics["seconds"], trained["time/train"]
        for stage, made, seconds in zip(COLORS, (played, judged, update), took, strict=True):
            spans.append(Span(iteration, stage, made.created_at.timestamp() - seconds, seconds))
    zero = min(span.begin for span in spans)
    return [span._replace(begin=span.begin - zero) for span in spans]


def draw_timeline(rows: Sequence[tuple[str, Sequence[Span]]], path: Path) -> None:
    """One panel for each run: its stages over time, iterations numbered."""
    figure, stages = _figure(1.0 + 1.15 * len(rows)), list(COLORS)
    panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, spans) in zip(panels, rows, strict=True):
        for iteration, stage, begin, seconds in spans:
            lane = stages.index(stage)
            axes.barh(lane, seconds, left=begin, height=0.72, color=COLORS[stage])
            if stage != "score":
                middle = begin + seconds / 2
                axes.text(middle, lane, str(iteration), ha="center", va="center", fontsize=8, color="white")
        axes.set_yticks(range(3), stages, fontsize=9)
        axes.invert_yaxis()
        axes.set_title(title, fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("seconds")
    _save(figure, path)


def _figure(height: float) -> Figure:
    return Figure(figsize=(10.5, height), layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=110, facecolor="white")
