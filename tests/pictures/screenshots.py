"""Screenshots of the project's pages, and of Prefect's, in a real browser."""

import base64
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, BrowserContext, ViewportSize, sync_playwright

from flows.launch import prefect_server
from storage.processes.child import Child
from tests.support.paths import ROOT

SIZE: ViewportSize = {"width": 1280, "height": 820}
SETTLE_MS = 1500
"""Time for a page to draw its charts."""


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A headless Chromium.

    Raises:
        SystemExit: none is installed.
    """
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        raise SystemExit("no chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


def shoot(context: BrowserContext, address: str, path: Path) -> None:
    """Save the first screen of the page at `address`."""
    page = context.new_page()
    page.goto(address)
    page.wait_for_timeout(SETTLE_MS)
    page.screenshot(path=path)
    page.close()


@contextmanager
def open_app(*command: str) -> Iterator[str]:
    """The address, with its key, of the app that a command serves."""
    job = subprocess.Popen([sys.executable, "-m", *command, "--port", "0"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert job.stdout
        found = re.search(r"http://127\.0\.0\.1:\d+/\?key=\S+", line := job.stdout.readline())
        assert found, line
        yield found[0]
    finally:
        job.send_signal(signal.SIGTERM)
        job.wait()


@contextmanager
def open_prefect(browser: Browser) -> Iterator[tuple[BrowserContext, str]]:
    """Serve Prefect's pages over the database in PREFECT_HOME, to a browser that knows the password."""
    server, password = Child(ROOT / "var/prefect/screenshots.log"), prefect_server.new_password()
    with prefect_server.listen() as listener:
        address = f"http://{prefect_server.HOST}:{listener.getsockname()[1]}"
        settings = {"PREFECT_SERVER_UI_API_URL": f"{address}/api"}
        prefect_server.start(server, listener, password, os.environ | settings)
    try:
        context = browser.new_context(viewport=SIZE)
        secret = base64.b64encode(password.encode()).decode()
        context.add_init_script(
            f"localStorage.setItem('prefect-password', '{secret}');"
            "localStorage.setItem('prefect-show-promotional-content', 'false')"
        )
        yield context, address
    finally:
        server.close()


def shrink(path: Path) -> None:
    """Reduce a picture to a palette: screenshots need no more, and repositories are cloned whole."""
    from PIL import Image

    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(64)
    small.save(path, optimize=True)
