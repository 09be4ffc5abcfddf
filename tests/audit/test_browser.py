"""Report and reader in a real browser: they open, sort, filter, page, and show hostile text as text.

Screenshots are kept in var/screenshots for a look.
"""

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from configs.audit import Audit
from storage import layout
from storage.objects.store import Store
from storage.records import SCORE_SCHEMA, TRAJECTORY_SCHEMA, Call, Score, Trajectory, VerdictName
from storage.versions.checkpoints import Checkpoint
from storage.versions.drafts import Provenance
from tasks.audit.data_sets import select
from tasks.audit.record import REPORT, commit_audit, read_audit
from tasks.audit.run import audit
from tasks.score.verifier import Verifier
from tests.support.chain_helpers import commit_rows
from tests.support.paths import ROOT
from tests.support.train_helpers import make_trajectory

SCREENSHOTS = ROOT / "var" / "screenshots"
WIDE, NARROW = (1280, 900), (400, 800)
PATIENCE_S = 120
"""A guard against hanging; an idle machine needs a second."""
CELLS = "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
EVIL = [
    "<script>window.evil = 1</script><img src=x onerror='window.evil = 1'>",
    "[click](javascript:window.evil=1) **bold** $\\frac{1}{2}$ \\boxed{3}",
    "left \u202egnp.exe\u202c right \u200b zero",
    "A" * 1_000_000,
]


CALLED: dict[str, Any] = {
    "calls": [
        Call(0, "c1", "calculator", '{"expression": "12 + 7"}', "19", "answered"),
        Call(0, "c2", EVIL[0], EVIL[2], EVIL[1] * 20, "failed"),
        Call(0, "c3", "", EVIL[3][:5000], "", "unparsable"),
    ],
    "ungraded": [0],
    "sequence_starts": [0, 5],
    "reward_parts": [{}, {"format": 0.5, EVIL[0]: 1.5}],
}
"""Columns of an episode that calls tools; its second turn has a rewritten history."""


def rows() -> list[Trajectory]:
    """Return 15 groups of 4 trajectories, each with text that tries to be more than text."""
    made = []
    for number in range(60):
        problem, sample = divmod(number, 4)
        row = make_trajectory(
            f"shared/000000/{problem}</script>/{sample}", [[7, 8], [9]], problem=f"{problem}</script>"
        )
        turns = [
            dataclasses.replace(turn, text=EVIL[number % 4], seed=number, feedback="" if place else "Try again.")
            for place, turn in enumerate(row.turns)
        ]
        policy = layout.checkpoint("shared", 0)
        prompt = f"What is {problem} + 1? {EVIL[0]}"
        row = dataclasses.replace(row, sample=sample, turns=turns, prompt=prompt, solutions=["3"], policy=policy)
        made.append(dataclasses.replace(row, **CALLED) if number % 4 == 1 else row)
    return made


def scores(made: list[Trajectory]) -> list[Score]:
    verdicts: list[tuple[VerdictName, float]] = [("wrong", 0.0), ("correct", 1.0), ("unparsable", 0.0)]
    return [
        Score(row.trajectory_id, turn, verdict, right, "3", "3", "", right)
        for number, row in enumerate(made)
        for turn in range(2)
        for verdict, right in [verdicts[(number + turn) % 3]]
    ]


@pytest.fixture(scope="module")
def audited(
    policies: list[Checkpoint], checkpoint_store: Store, verifier: Verifier, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Store, str]:
    """A store with hostile rows, and their audit."""
    root = tmp_path_factory.mktemp("browser") / "store"
    shutil.copytree(Path(checkpoint_store.path("runs")).parent, root)
    store, made = Store(str(root)), rows()
    version = layout.trajectories("shared", 0)
    commit_rows(store, version, "trajectories", TRAJECTORY_SCHEMA, made, [policies[0].version])
    commit_rows(store, layout.scores("shared", 0, "5c"), "scores", SCORE_SCHEMA, scores(made), [version])
    sets = select(store, ["shared"])
    with audit(store, sets, Audit(recomputed=0), root / "cache", verifier) as found:
        return store, commit_audit(store, sets, found, Provenance(config={}), root / "cache", "read").version


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        reason = "no chromium: apt-get install chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    expect.set_options(timeout=1000 * PATIENCE_S)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def reader(audited: tuple[Store, str]) -> Iterator[str]:
    """The reader's address with its key; the reader is started as users start it."""
    store, version = audited
    command = [sys.executable, "-m", "tasks.audit", "--root", store.root, "read", version, "--port", "0"]
    job = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert job.stdout
    found = re.search(r"http://127\.0\.0\.1:\d+/\?key=\S+", line := job.stdout.readline())
    assert found, line
    yield found[0]
    job.send_signal(signal.SIGTERM)
    assert job.wait(PATIENCE_S) == 143


class Watch:
    """A page that records its requests, console messages, errors and dialogs."""

    def __init__(self, browser: Browser, size: tuple[int, int]) -> None:
        look: Literal["light", "dark"] = "dark" if size == NARROW else "light"
        self.context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=look)
        self.context.set_default_timeout(1000 * PATIENCE_S)
        self.page: Page = self.context.new_page()
        self.requests: list[str] = []
        self.messages: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("dialog", lambda dialog: self.messages.append(f"dialog {dialog.message}"))

    def harmless(self, name: str) -> None:
        """Check that no text from data was run, no page error occurred, and nothing is wider than the window."""
        self.page.wait_for_load_state()  # until its style sheets are there, a page may be wider
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png")
        assert self.messages == []
        assert self.page.evaluate("window.evil") is None
        assert self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.fixture
def report(audited: tuple[Store, str]) -> str:
    store, version = audited
    return (read_audit(store, version, Path(store.path("cache")))[1] / REPORT).as_uri()


def test_the_report_needs_no_other_file(browser: Browser, report: str) -> None:
    """The report is one file without requests, with the verdict first; no hostile text runs or leaves its box."""
    watch = Watch(browser, NARROW)
    watch.page.goto(report)
    expect(watch.page.locator("h1")).to_contain_text("FAIL")
    watch.harmless("report")
    watch.page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    expect(watch.page.get_by_text("<script>window.evil = 1</script>").first).to_be_visible()
    expect(watch.page.get_by_text("⟨U+202E⟩gnp.exe").first).to_be_visible()
    watch.page.locator("#tools").scroll_into_view_if_needed()
    expect(watch.page.get_by_role("region", name="Calls of tools")).to_contain_text(EVIL[0])
    watch.harmless("report-tools")
    assert watch.requests == [report]


def test_tables_of_the_report_sort(browser: Browser, report: str) -> None:
    """Mouse and keyboard sort whole rows in the announced order, with empty cells last."""
    watch = Watch(browser, WIDE)
    watch.page.goto(report)
    table = watch.page.get_by_role("region", name="All checks").locator("table")
    header = table.locator("th", has_text="cases")
    column = int(header.evaluate("cell => cell.cellIndex"))
    texts = [row[column].strip() for row in table.locator("tbody tr").evaluate_all(CELLS)]
    numbers = sorted((text for text in texts if text.replace(",", "").isdigit()), key=lambda t: int(t.replace(",", "")))
    empty = [text for text in texts if text not in numbers]
    assert empty
    header.click()
    for direction, expected in (("descending", numbers[::-1]), ("ascending", numbers)):
        expect(header).to_have_attribute("aria-sort", direction)
        expect(table.locator(f"tbody td:nth-child({column + 1})")).to_have_text([*expected, *empty])
        header.focus()
        watch.page.keyboard.press("Enter")
    watch.page.locator("table a[href='#check-duplicate_ids']").first.click()  # in a folded section
    expect(watch.page.locator("#check-duplicate_ids")).to_be_visible()
    watch.harmless("report-sorted")


def test_trajectories_are_read_page_by_page(browser: Browser, reader: str) -> None:
    """List, filter, conversation, tokens by logprob and by advantage, and group show all data as text."""
    watch = Watch(browser, NARROW)
    page = watch.page
    page.goto(reader)
    expect(page.get_by_role("status")).to_contain_text("60 trajectories")
    watch.harmless("reader-list")
    page.get_by_role("link", name="Next →").first.click()
    expect(page.get_by_role("status")).to_contain_text("51 to 60")
    page.get_by_role("textbox", name="Text").fill("javascript:")
    page.locator("select[name=verdict]").select_option("correct")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_role("status")).to_contain_text("10 of 60 trajectories")

    page.locator("td a.id").first.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_text("[click](javascript:window.evil=1)").first).to_be_visible()
    expect(page.get_by_text(f"Call of {EVIL[0][:40]}")).to_be_visible()
    page.locator(".turn summary").first.click()
    watch.harmless("reader-trajectory")
    page.get_by_role("link", name="advantage").click()
    expect(page.locator("[aria-current]", has_text="advantage")).to_be_visible()
    watch.harmless("reader-advantage")
    page.get_by_role("link", name=re.compile("group")).first.click()
    watch.harmless("reader-group")
    assert all(url.startswith(reader.partition("?")[0]) for url in watch.requests)


def test_the_cases_of_an_audit_are_read(browser: Browser, reader: str) -> None:
    """The reader links the report, and the cases of a check are a filter."""
    watch, address = Watch(browser, WIDE), reader.partition("?")[0]
    watch.page.goto(reader)
    watch.page.goto(f"{address}report")
    expect(watch.page.locator("h1")).to_contain_text("FAIL")
    watch.page.goto(f"{address}?check=hidden_characters")
    expect(watch.page.get_by_role("status")).to_contain_text("15 of 60 trajectories")
    watch.harmless("reader-cases")
