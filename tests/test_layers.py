"""Rules for imports, which keep the stages apart and the command line fast."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.paths import ROOT

LAYERS = ["configs", "storage", "tasks", "flows"]
STORAGE = ["telemetry", "processes", "objects", "logs", "versions", "maintenance", "commands", "__main__"]
"""The order inside of storage/. Modules directly in it (errors, layout, records, …) come before all of these."""
TASKS = [
    *("inference", "tables", "problems", "tools", "score", "environments", "agents", "train", "rollout", "cluster"),
    *("warm_start", "annotate", "metrics", "evaluate", "tracking", "provenance", "audit", "fit", "watch", "retrain"),
]
"""The order inside of tasks/."""
FLOWS = ["run", "stages"]
"""The order inside of flows/. The flows, modules directly in it, and how they are launched come after these."""
TORCH_MAY_BE_IN = (
    "tasks/train/",
    "tasks/warm_start/",
    "tasks/inference/worker.py",
    "tasks/inference/launch.py",
    "storage/versions/weights.py",
)


def modules() -> list[Path]:
    return sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Yield the imported names, each of which may be a module: `from storage import layout` gives `storage.layout`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rank(parts: Sequence[str]) -> tuple[int, int]:
    """Return the rank of a module: its layer, and its place within the layer.

    >>> rank(["storage", "layout"]) < rank(["storage", "objects", "store"]) < rank(["tasks", "score", "verifier"])
    True
    """
    layer, inside = LAYERS.index(parts[0]), parts[1] if len(parts) > 1 else ""
    if parts[0] == "storage" and inside in STORAGE:
        return layer, 1 + STORAGE.index(inside)
    if parts[0] == "flows":
        return layer, FLOWS.index(inside) if inside in FLOWS else len(FLOWS)
    if parts[0] == "tasks" and inside in TASKS:
        return layer, 1 + TASKS.index(inside)
    return layer, 0


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    """Imports follow flows -> tasks -> storage -> configs and the orders above; few modules import Prefect or torch."""
    place = path.relative_to(ROOT)
    parts = place.with_suffix("").parts
    for name in imports(path):
        package = name.split(".")[0]
        if package in LAYERS:
            assert rank(name.split(".")) <= rank(parts), f"{place} imports {name}"
        if package == "prefect":
            assert parts[0] == "flows", f"{place} imports Prefect"
        if package == "torch":
            assert str(place).startswith(TORCH_MAY_BE_IN), f"{place} imports torch"


def test_every_folder_has_its_place() -> None:
    """A folder without a place in the order could import anything."""
    folders = {
        layer: {path.name for path in (ROOT / layer).iterdir() if (path / "__init__.py").exists()} for layer in LAYERS
    }
    assert folders["storage"] | {"__main__"} == set(STORAGE)
    assert folders["tasks"] == set(TASKS)
    assert folders["flows"] == {*FLOWS, "launch"}


HEAVY = [
    "torch",
    "transformers",
    "vllm",
    "scipy",
    "duckdb",
    "matplotlib",
    "math_verify",
    "aiohttp",
    "tenacity",
    "pandas",
]


def test_the_command_line_imports_nothing_heavy() -> None:
    """`--help` answers at once, because models and engines are imported only when a stage begins."""
    code = f"import sys, flows.math_mt_ppo; print([name for name in {HEAVY} if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert printed.stdout.strip() == "[]"


LATE = """
import sys
from configs import load
from flows.run import resources
from flows.run.workspace import Workspace
with resources.open_trainer(Workspace(load("smoke", ["storage.root=/nonexistent", "storage.cache=/nonexistent"]))):
    print("torch" in sys.modules)
"""


def test_no_episode_waits_for_the_trainer() -> None:
    """It is opened before the first rollout, and imports torch for seconds when it gets its first order."""
    printed = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, cwd=ROOT, check=True)
    assert printed.stdout.strip() == "False"
