"""Texts of unknown origin on a terminal: no escape sequence, no reordering and no endless line is printed."""

import subprocess
import sys
from typing import Any

import pytest

from storage.__main__ import main as storage_main
from storage.commands.program import Output, table
from storage.objects.store import Store
from storage.versions import aliases
from storage.versions.drafts import Draft, Provenance
from tasks.evaluate import summary as evaluation
from tasks.provenance.__main__ import main as provenance_main
from tests.support.paths import ROOT
from tests.support.programs import call_program

EVIL = "\x1b[2J\r\x07\u202e\u200b\x9b"
ENDLESS = "x" * 100_000


def is_clean(text: str) -> bool:
    return not set(text) & set("\x1b\r\x07\u202e\u200b\x9b") and max(map(len, text.splitlines()), default=0) < 2500


def printed_by(*command: str) -> str:
    call = [sys.executable, *command]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    return done.stdout + done.stderr


def test_commands_print_no_escapes(store: Store) -> None:
    """Tables, lines and errors contain manifest texts or arguments, all made printable; JSON holds them unchanged."""
    bad, root = EVIL + ENDLESS, ("--root", store.root)
    for number in range(2):
        with Draft(store, f"runs/r/checkpoints/{number:06d}", "checkpoint") as draft:
            path = draft.scratch / "data"
            path.write_text("x")
            draft.add(path, "a")
            config, metrics = {bad: f"{bad}{number}"}, {bad: f"{bad}{number}"}
            provenance = Provenance(config=config, prefect_run_id=bad)
            draft.commit(provenance, [f"runs/r/checkpoints/{number - 1:06d}"] if number else [], metrics)
    aliases.move(store, "best", "runs/r/checkpoints/000001", None, reason=bad)
    assert is_clean(call_program(storage_main, *root, "show", "--config", "best")[0])
    assert is_clean(call_program(storage_main, *root, "show", f"no{EVIL}{ENDLESS}", status=1)[1])
    assert is_clean(call_program(provenance_main, "--root", f"/nowhere{EVIL}{ENDLESS}", "impact", EVIL, status=1)[1])
    printed, _ = call_program(storage_main, *root, "--json", "alias", "history", "best")
    assert "\\u202e" in printed
    assert ENDLESS in printed


@pytest.mark.slow
def test_errors_of_flows_are_clean() -> None:
    """Errors of flows before they start are printable and keep their own line breaks."""
    printed = printed_by("-m", "flows.math_mt_ppo", "smoke", f"run.{EVIL}=1")
    assert is_clean(printed)
    assert "smoke:\n  run.⟨U+001B⟩" in printed


def test_tables_are_clean(capsys: pytest.CaptureFixture[str]) -> None:
    """Titles and columns of both kinds of table are printable, and markup in them is text."""
    rows = [{f"a{EVIL}": f"[red]{EVIL}{ENDLESS}[/red]"}]
    made: list[Any] = [table([EVIL], [[EVIL + ENDLESS]], title=EVIL), EVIL + ENDLESS]
    Output(None, made).print(as_json=False)
    printed = capsys.readouterr().out + evaluation.rendered(evaluation.table(f"[b]{EVIL}", rows), f"[i]{EVIL}")
    assert is_clean(printed)
    assert all(markup in printed for markup in ("[red]", "[b]", "[i]"))


def test_logs_are_clean() -> None:
    """Messages, arguments and tracebacks of all loggers are printable, whatever handler prints them."""
    code = (
        "import logging, sys\nfrom storage.visible import print_clean_logs\nevil = sys.argv[1]\n"
        "logging.basicConfig(format='%(message)s')\nprint_clean_logs()\nlog = logging.getLogger(evil)\n"
        "log.warning('two\\nlines %s', evil)\nlog.warning(ValueError(evil))\nlog.warning('%d', 7)\n"
        "try: raise ValueError(evil + 'y' * 100_000)\nexcept ValueError: log.exception('said')\n"
        "log.warning('%d wrong', evil)\n"
    )
    printed = printed_by("-c", code, EVIL)
    assert is_clean(printed.replace(repr(EVIL), ""))
    assert printed.startswith("two\nlines ⟨U+001B⟩[2J⟨U+000D⟩")
    assert "\n7\n" in printed
    assert "ValueError: ⟨U+001B⟩" in printed
