"""Who may import whom: the rules that keep the stages apart and the command line fast."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ["configs", "storage", "tasks", "flows"]
TORCH_MAY_BE_IN = ("tasks/ppo/", "tasks/warm_start/", "storage/reload.py")


def modules() -> list[Path]:
    return sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    """flows -> tasks -> storage -> configs; Prefect above tasks/*.py only; torch where models are."""
    place = path.relative_to(ROOT)
    rank = LAYERS.index(place.parts[0])
    for name in imports(path):
        package = name.split(".")[0]
        if package in LAYERS:
            assert LAYERS.index(package) <= rank, f"{place} imports {name}"
        if package == "prefect":
            assert place.parts[0] == "flows" or (place.parts[0] == "tasks" and len(place.parts) == 2), place
        if package == "torch":
            assert str(place).startswith(TORCH_MAY_BE_IN), f"{place} imports torch"


HEAVY = ["torch", "transformers", "vllm", "scipy", "duckdb", "matplotlib", "math_verify", "aiohttp", "tenacity"]


def test_the_command_line_imports_nothing_heavy() -> None:
    """`--help` answers at once: models and engines are imported when a stage begins."""
    code = f"import sys, flows.math_mt_ppo; print([name for name in {HEAVY} if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert printed.stdout.strip() == "[]"
