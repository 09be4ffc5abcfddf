"""Report and reader in a real browser: they open, sort, filter, page, and show hostile text as text.

Screenshots are kept in var/screenshots for a look.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from configs.audit import Audit
from storage.objects.store import Store
from storage.records import Call
from storage.versions.drafts import Provenance
from tasks.audit.run import REPORT, audit, commit_audit, read_audit
from tasks.score.verifier import Verifier
from tasks.tables.sets import select
from tests.conftest import commit_policy
from tests.support.paths import ROOT
from tests.support.reader_helpers import EVIL, HOSTILE, PLAIN, STRANGE, commit, strange, sums

SCREENSHOTS = ROOT / "var" / "screenshots"
WIDE, NARROW = (1280, 900), (400, 800)
PATIENCE_S = 120
"""A guard against hanging; an idle machine needs a second."""
CELLS = "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
CALLS = [
    Call(0, "c1", "calculator", '{"expression": "12 + 7"}', "19", "answered"),
    Call(0, "c2", HOSTILE, HOSTILE, HOSTILE * 20, "failed"),
    Call(0, "c3", "", "A" * 5000, "", "unparsable"),
]


@pytest.fixture(scope="module")
def audited(policy_folder: Path, verifier: Verifier, tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, str]:
    """A store with text that tries to be more than text, and its audit."""
    root = tmp_path_factory.mktemp("browser") / "store"
    store, (hostile, _) = Store(str(root)), strange()
    policy = commit_policy(store, 0, policy_folder).version
    commit(store, PLAIN, sums(PLAIN, 15), [policy])
    called: dict[str, Any] = {"calls": CALLS, "ungraded": [0], "reward_parts": [{"format": 0.5, EVIL: 1.5}]}
    commit(store, STRANGE, ([replace(row, **called) if row.turns else row for row in hostile], []), [policy])
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
    """The address, with its key, of the reader, started as users start it."""
    store, version = audited
    command = ["-m", "tasks.audit", "--root", store.root, "read", version, "--port", "0"]
    job = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert job.stdout
    found = re.search(r"http://127\.0\.0\.1:\d+/\?key=\S+", line := job.stdout.readline())
    assert found, line
    yield found[0]
    job.send_signal(signal.SIGTERM)
    assert job.wait(PATIENCE_S) == 143


class Visit:
    """A page that records its requests, console messages, errors and dialogs."""

    def __init__(self, browser: Browser, size: tuple[int, int]) -> None:
        look: Literal["light", "dark"] = "dark" if size == NARROW else "light"
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=look)
        context.set_default_timeout(1000 * PATIENCE_S)
        self.page: Page = context.new_page()
        self.requests, self.messages = list[str](), list[str]()
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("dialog", lambda dialog: self.messages.append(f"dialog {dialog.message}"))

    def harmless(self, name: str) -> None:
        """Check that no text from data was run, no page error occurred, and nothing is wider than the window."""
        self.page.wait_for_load_state()  # until its style sheets are there, a page may be wider
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png")
        assert self.messages == [], "such as a dialog that a script in the data opened"
        assert self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.fixture
def report(audited: tuple[Store, str]) -> str:
    store, version = audited
    return (read_audit(store, version, Path(store.path("cache")))[1] / REPORT).as_uri()


def test_the_report_needs_no_other_file(browser: Browser, report: str) -> None:
    """The report is one file without requests, with the verdict first; no hostile text runs or leaves its box."""
    visit = Visit(browser, NARROW)
    visit.page.goto(report)
    expect(visit.page.locator("h1")).to_contain_text("FAIL")
    visit.harmless("report")
    visit.page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    expect(visit.page.get_by_text(f"{EVIL}'\"{{{{ 7 * 7 }}}} ⟨U+202E⟩ltr").first).to_be_visible()
    visit.page.locator("#tools").scroll_into_view_if_needed()
    expect(visit.page.get_by_role("region", name="Calls of tools")).to_contain_text(EVIL)
    visit.harmless("report-tools")
    assert visit.requests == [report]


def test_tables_of_the_report_sort(browser: Browser, report: str) -> None:
    """Mouse and keyboard sort whole rows in the announced order, with empty cells last."""
    visit = Visit(browser, WIDE)
    visit.page.goto(report)
    table = visit.page.get_by_role("region", name="All checks").locator("table")
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
        visit.page.keyboard.press("Enter")
    visit.page.locator("table a[href='#check-duplicate_ids']").first.click()  # in a folded section
    expect(visit.page.locator("#check-duplicate_ids")).to_be_visible()
    visit.harmless("report-sorted")


def test_trajectories_are_read_page_by_page(browser: Browser, reader: str) -> None:
    """List, filter, conversation, tokens by logprob and by advantage, and group show all data as text."""
    visit = Visit(browser, NARROW)
    page = visit.page
    page.goto(reader)
    expect(page.get_by_role("status")).to_contain_text("67 trajectories")
    visit.harmless("reader-list")
    page.get_by_role("link", name="Next →").first.click()
    expect(page.get_by_role("status")).to_contain_text("51 to 67")
    page.get_by_role("textbox", name="Text").fill("javascript:")
    page.locator("select[name=calls]").select_option("failed")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_role("status")).to_contain_text("1 of 67 trajectories")

    page.locator("td a.id").first.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_text("[a](javascript:alert(2))").first).to_be_visible()
    expect(page.get_by_text(f"Call of {EVIL}")).to_be_visible()
    page.locator(".turn summary").first.click()
    visit.harmless("reader-trajectory")
    page.get_by_role("link", name="advantage").click()
    expect(page.locator("[aria-current]", has_text="advantage")).to_be_visible()
    visit.harmless("reader-advantage")
    page.get_by_role("link", name=re.compile("group")).first.click()
    visit.harmless("reader-group")
    assert all(url.startswith(reader.partition("?")[0]) for url in visit.requests)
    page.goto(f"{reader.partition('?')[0]}?check=hidden_characters")
    expect(page.get_by_role("status")).to_contain_text("1 of 67 trajectories")
    visit.harmless("reader-cases")
