"""Two drawings: the stages with the versions between them, and where the time of an iteration goes."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from storage import layout
from storage.objects.store import Store
from storage.version_names import ScoresVersion
from storage.versions import manifests
from tasks.metrics.rows import row_of

BLUE, GREEN, ORANGE, GREY = "#2f6f9f", "#3c8d5a", "#c9772e", "#8a8f98"
DPI = 110
_ARROW: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 14}


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle with a title and a line below it; `x` and `y` are its centre."""

    x: float
    y: float
    width: float
    title: str
    about: str
    color: str
    filled: bool = True


STAGES = [
    Box(0.42, 0.80, 0.18, "rollout", "async agents and vLLM", BLUE),
    Box(0.66, 0.80, 0.18, "score", "math-verify", GREEN),
    Box(0.90, 0.80, 0.18, "train", "PPO in torch", ORANGE),
]
VERSIONS = [
    Box(0.12, 0.80, 0.20, "problems", "fingerprint", GREY, filled=False),
    Box(0.12, 0.30, 0.20, "policy n", "checkpoint, canary", GREY, filled=False),
    Box(0.42, 0.30, 0.20, "trajectories n", "Parquet", GREY, filled=False),
    Box(0.66, 0.30, 0.20, "scores n", "Parquet", GREY, filled=False),
    Box(0.90, 0.30, 0.18, "policy n+1", "checkpoint", GREY, filled=False),
]


def draw_stages(path: Path) -> None:
    """Stages above, versions below: every arrow reads or commits a version."""
    figure, axes = _figure(10.5, 3.4)
    axes.set(xlim=(0, 1), ylim=(0.0, 1.0))
    axes.axis("off")
    for box in (*STAGES, *VERSIONS):
        _draw_box(axes, box)
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


def _draw_box(axes: Axes, box: Box) -> None:
    height = 0.24
    corner = (box.x - box.width / 2, box.y - height / 2)
    face = box.color if box.filled else "white"
    style = "round,pad=0,rounding_size=0.02"
    axes.add_patch(
        FancyBboxPatch(corner, box.width, height, boxstyle=style, facecolor=face, edgecolor=box.color, lw=1.4)
    )
    ink = "white" if box.filled else "#222"
    axes.text(box.x, box.y + 0.045, box.title, ha="center", va="center", fontsize=12, color=ink, weight="bold")
    axes.text(box.x, box.y - 0.06, box.about, ha="center", va="center", fontsize=9, color=ink)


@dataclass(frozen=True, slots=True)
class Span:
    """A stage of one iteration, in seconds since the first span began.

    Example: Span(iteration=41, stage="rollout", begin=0.0, end=0.62)
    """

    iteration: int
    stage: str
    begin: float
    end: float


COLORS = {"rollout": BLUE, "score": GREEN, "train": ORANGE}


def read_spans(store: Store, run: str, iterations: Sequence[int]) -> list[Span]:
    """When each stage of the iterations worked, from its manifest: the time of its commit, and how long it took."""
    moments: list[tuple[int, str, datetime, float]] = []
    for iteration in iterations:
        update = manifests.read(store, layout.checkpoint(run, iteration + 1))
        (scores,) = (name for name in update.parent_names if ScoresVersion.is_place(name))
        played, judged = manifests.read(store, layout.trajectories(run, iteration)), manifests.read(store, scores)
        moments.append((iteration, "rollout", played.created_at, played.metrics["seconds"]))
        moments.append((iteration, "score", judged.created_at, judged.metrics["seconds"]))
        trained = row_of(update)
        assert trained
        moments.append((iteration, "train", update.created_at, trained["time/train"]))
    zero = min(end.timestamp() - seconds for _, _, end, seconds in moments)
    return [
        Span(iteration, stage, end.timestamp() - seconds - zero, end.timestamp() - zero)
        for iteration, stage, end, seconds in moments
    ]


def draw_timeline(rows: Sequence[tuple[str, Sequence[Span]]], path: Path) -> None:
    """One panel for each run: its stages over time, iterations numbered."""
    figure = Figure(figsize=(10.5, 1.0 + 1.15 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, spans) in zip(panels, rows, strict=True):
        for span in spans:
            lane = ("rollout", "score", "train").index(span.stage)
            axes.barh(lane, span.end - span.begin, left=span.begin, height=0.72, color=COLORS[span.stage])
            if span.stage != "score":
                middle = (span.begin + span.end) / 2
                axes.text(middle, lane, str(span.iteration), ha="center", va="center", fontsize=8, color="white")
        axes.set_yticks(range(3), ["rollout", "score", "train"], fontsize=9)
        axes.invert_yaxis()
        axes.set_title(title, fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("seconds")
    _save(figure, path)


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, facecolor="white")
