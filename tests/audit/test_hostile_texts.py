"""Texts of unknown origin on a terminal: no escape sequence, no reordering and no endless line is printed."""

import subprocess
import sys
from typing import Any

import pytest

from storage.commands.program import Output, table
from storage.objects.store import Store
from storage.versions import aliases
from storage.versions.drafts import Draft, Provenance
from storage.visible import printable
from tasks.evaluate import summary as evaluation
from tests.support.paths import ROOT

EVIL = "\x1b[2J\r\x07\u202e\u200b\x9b"
ENDLESS = "x" * 100_000


def is_clean(text: str) -> bool:
    return not set(text) & set("\x1b\r\x07\u202e\u200b\x9b") and max(map(len, text.splitlines()), default=0) < 2500


def command(*arguments: str) -> str:
    """Return the output of a command, both streams."""
    call = [sys.executable, "-m", *arguments]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def evil_store(store: Store) -> Store:
    """A store whose manifests have hostile text in every text field."""
    bad = EVIL + ENDLESS
    for number in range(2):
        with Draft(store, f"runs/r/checkpoints/{number:06d}", "checkpoint") as draft:
            path = draft.scratch / "data"
            path.write_text("x")
            draft.add(path, "a")
            config, metrics = {bad: f"{bad}{number}"}, {bad: f"{bad}{number}"}
            provenance = Provenance(config=config, prefect_run_id=bad)
            draft.commit(provenance, [f"runs/r/checkpoints/{number - 1:06d}"] if number else [], metrics)
    aliases.move(store, "best", "runs/r/checkpoints/000001", None, reason=bad)
    return store


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [["show", "--config", "best"], ["alias", "history", "best"], ["show", f"no{EVIL}{ENDLESS}"]],
    ids=["show", "history", "error"],
)
def test_commands_of_the_store_print_no_escapes(evil_store: Store, arguments: list[str]) -> None:
    """Tables, lines and errors contain manifest texts or arguments, all made printable."""
    printed = command("storage", "--root", evil_store.root, *arguments)
    assert is_clean(printed)


def test_json_stays_exact(evil_store: Store) -> None:
    """JSON for scripts holds the stored text unchanged."""
    printed = command("storage", "--root", evil_store.root, "--json", "alias", "history", "best")
    assert "\\u202e" in printed
    assert "x" * 100_000 in printed


@pytest.mark.slow
def test_errors_of_the_command_lines_are_clean() -> None:
    """Errors of flows before they start, and of the audit, are printable and keep their own line breaks."""
    printed = command("flows.math_mt_ppo", "smoke", f"run.{EVIL}=1")
    assert is_clean(printed)
    assert "smoke:\n  run.⟨U+001B⟩" in printed
    assert is_clean(command("tasks.audit", "--root", f"/nowhere{EVIL}{ENDLESS}", "trained-on", EVIL))


def test_tables_are_clean(capsys: pytest.CaptureFixture[str]) -> None:
    """Titles and columns of both kinds of table are printable, and markup in them is text."""
    rows = [{f"a{EVIL}": f"[red]{EVIL}{ENDLESS}[/red]"}]
    made: list[Any] = [table([EVIL], [[EVIL + ENDLESS]], title=EVIL), EVIL + ENDLESS]
    Output(None, made).print(as_json=False)
    printed = capsys.readouterr().out + evaluation.rendered(evaluation.table(f"[b]{EVIL}", rows), f"[i]{EVIL}")
    assert is_clean(printed)
    assert "[red]" in printed
    assert "[b]" in printed
    assert "[i]" in printed


def test_logs_are_clean() -> None:
    """Messages, arguments and tracebacks of all loggers are printable, whatever handler prints them."""
    code = (
        "import logging, sys\nfrom storage.visible import print_clean_logs\nevil = sys.argv[1]\n"
        "logging.basicConfig(format='%(message)s')\nprint_clean_logs()\nlog = logging.getLogger(evil)\n"
        "log.warning('two\\nlines %s', evil)\nlog.warning(ValueError(evil))\nlog.warning('%d', 7)\n"
        "try: raise ValueError(evil + 'y' * 100_000)\nexcept ValueError: log.exception('said')\n"
        "log.warning('%d wrong', evil)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, EVIL], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert is_clean(done.stderr.replace(repr(EVIL), ""))
    assert done.stderr.startswith("two\nlines ⟨U+001B⟩[2J⟨U+000D⟩")
    assert "\n7\n" in done.stderr
    assert "ValueError: ⟨U+001B⟩" in done.stderr


def test_our_own_lines_stay() -> None:
    """Line breaks, tabs and letters of any language stay unchanged."""
    text = "error: a\n  b\tÄ 数学 🙂\n"
    assert printable(text) == text
    assert printable("") == ""
    assert len(printable(ENDLESS)) < 2100
