"""What a check is given, and what it returns."""

import json
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

Status = Literal["pass", "fail", "skipped"]
Numbers = dict[str, float | str]


@dataclass(frozen=True, slots=True)
class Setting:
    """The device, and an empty folder for files."""

    device: Literal["cuda", "cpu"]
    folder: Path

    @property
    def rehearsal(self) -> bool:
        """True without a GPU: all shapes are tiny, and what needs CUDA is skipped."""
        return self.device == "cpu"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table.

    Example: Check("losses: defaults", "pass", {"weights": 4.9e-6}, "against the CPU, in float32")
    """

    name: str
    status: Status
    numbers: Numbers = field(default_factory=dict)
    said: str = ""


def limited(name: str, numbers: dict[str, float], limits: dict[str, float], said: str = "") -> Check:
    """Return a check that passes if no number, of those with a limit, is NaN or above it."""
    above = [f"{key} is above {limit:g}" for key, limit in limits.items() if not numbers[key] <= limit]
    return Check(name, "fail" if above else "pass", dict(numbers), "; ".join([*above, *([said] if said else [])]))


def attempt(name: str, compute: Callable[[], Check]) -> Check:
    """Return the check that `compute` makes, or a failed one: the next ones are made all the same."""
    try:
        return compute()
    except Exception as error:  # noqa: BLE001  # whatever it is, it is this check's result
        traceback.print_exc()  # into the log
        return Check(name, "fail", said=f"{type(error).__name__}: {str(error)[:300]}")


def needs_cuda(name: str) -> Check:
    return Check(name, "skipped", said="needs CUDA")


def write(checks: Iterable[Check], results: Path) -> None:
    """Append each check to a file as soon as it is there: what is stopped later has left its results."""
    with results.open("a") as file:
        for check in checks:
            print(json.dumps(asdict(check)), file=file, flush=True)


def read(results: Path) -> list[Check]:
    """Return the checks of a file; without the file, none."""
    return [Check(**json.loads(line)) for line in results.read_text().splitlines()] if results.exists() else []
