"""What a command prints: the story of a run, without Prefect's lines, and an error once."""

import logging
import sys
from pathlib import Path

import prefect
import pytest

from configs import ConfigError
from flows.launch.cli import Console, status
from storage.visible import Fleeting


def record(text: str, level: int = logging.INFO, path: str = __file__) -> logging.LogRecord:
    return logging.LogRecord("prefect.task_runs", level, path, 1, text, (), None)


def test_the_console_leaves_out_prefect_and_most_of_the_progress(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal, progress is a line now and then."""
    console = Console()
    console.emit(record("Finished in state Completed()", path=f"{Path(prefect.__file__).parent}/task_engine.py"))
    console.emit(record(Fleeting("16/512 episodes")))
    console.emit(record("iter 1/2  reward +0.5 [/red]"))
    console.emit(record("ALARM: \x1b[2J", logging.WARNING))
    console._printed -= 60
    console.emit(record(Fleeting("32/512 episodes")))
    console.close()
    printed = capsys.readouterr().err.splitlines()
    assert printed[0].endswith(" iter 1/2  reward +0.5 [/red]")
    assert printed[1].endswith(" warning: ALARM: ⟨U+001B⟩[2J")
    assert printed[2:] == ["32/512 episodes"]


def test_a_line_of_progress_is_gone_when_a_line_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables may be printed then."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    console, seen = Console(), list[bool]()
    for text in (Fleeting("16/512 episodes"), "iter 1/1", Fleeting("[/red]"), "checkpoint 1 on 512 problems"):
        console.emit(record(text))
        seen.append(console._line.is_started)
    console.close()
    assert seen == [True, False, True, False]


def test_an_error_is_told_once_with_the_line_of_the_users_code(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody expected has a traceback, but without the lines of Prefect."""
    functions = ["def reset():\n    raise OSError('no exit')\n", "def step():\n    return {}['wall']\n"]
    functions.append("def load():\n    import json\n    json.loads('x')\n")
    (tmp_path / "maze.py").write_text("\n".join(functions))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("flows.launch.cli.print_clean_logs", lambda: None)
    maze = __import__("maze")

    def flow() -> None:
        prefect.flow(maze.step).fn()

    def refuse() -> None:
        raise ConfigError("algorithm.eps_clp: did you mean eps_clip?")

    assert status(maze.reset, verbose=False) == 1
    assert capsys.readouterr().err == "error: no exit (maze.py:2 in reset)\n"
    assert status(flow, verbose=False) == 1
    told = capsys.readouterr().err
    assert told.endswith("KeyError: 'wall'\n")
    assert 'maze.py", line 5, in step' in told
    assert status(maze.load, verbose=False) == 1
    told = capsys.readouterr().err
    assert 'maze.py", line 9, in load' in told
    assert "JSONDecodeError: Expecting value" in told.splitlines()[-1]
    assert status(refuse, verbose=False) == 2
    assert capsys.readouterr().err.startswith("error: algorithm.eps_clp")
    sys.modules.pop("maze")
