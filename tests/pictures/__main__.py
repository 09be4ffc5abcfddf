"""Makes the pictures of the pages; see `tests.pictures`.

python -m tests.pictures --root ./var
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from storage.logs import catalog
from storage.objects.store import Store
from storage.versions import manifests
from tests.pictures import drawings, screenshots
from tests.support.paths import ROOT

LARGEST = 150_000
"""Bytes of a picture: every clone carries them."""
MAIN, AUDIT = ROOT / "flows/pictures", ROOT / "tasks/audit/pictures"
OVERLAP = ["run.name=demo-overlap", "run.iterations=12", "run.overlap=true", "rollout.max_head_offpolicyness=4"]
SHOWN = range(6, 10)
"""Iterations in the timeline: neither the first ones, in which everything starts, nor those with an evaluation."""


def main() -> None:
    """Make what is missing in the store, then every picture."""
    parser = argparse.ArgumentParser(prog="python -m tests.pictures", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", default="./var", help="store with the demo's runs; what it lacks is made there")
    root = parser.parse_args().root
    os.environ.setdefault("PREFECT_HOME", str(ROOT / "var/prefect"))
    store, audit = Store(root), make_runs(root)
    drawings.draw_stages(MAIN / "stages.png")
    panels = [
        ("one stage after the other", drawings.read_spans(store, "demo", SHOWN)),
        ("run.overlap=true: a stream plays episodes meanwhile", drawings.read_spans(store, "demo-overlap", SHOWN)),
    ]
    drawings.draw_timeline(panels, MAIN / "iteration.png")
    shutil.copyfile(store.path("runs/demo/report/learning_curve.png"), MAIN / "learning_curve.png")
    language_model = "runs/demo-llm/report/learning_curve.png"
    if store.exists(language_model):  # an hour's run, which is not made here
        shutil.copyfile(store.path(language_model), MAIN / "language_model.png")
    photograph(store, audit)
    for path in (*sorted(MAIN.glob("*.png")), *sorted(AUDIT.glob("*.png"))):
        screenshots.shrink(path)
        size = path.stat().st_size
        print(f"{path.relative_to(ROOT)}: {size:,} bytes")
        if size > LARGEST:
            raise SystemExit(f"that is more than {LARGEST:,}: show less, or use fewer colours")


def make_runs(root: str) -> str:
    """Run what the store lacks; returns the newest audit of the demo."""
    place, store = f"storage.root={root}", Store(root)
    for name, overrides in {"demo": [], "demo-overlap": OVERLAP}.items():
        if not store.exists(f"runs/{name}/report/summary.json"):
            _run("flows.math_mt_ppo", "demo", place, *overrides)
    if not _newest_audit(store):
        _run("flows.audit_trajectories", "--fail-on", "never", "demo", place)
    return _newest_audit(store)


def _run(*command: str) -> None:
    print(f"python -m {' '.join(command)}", flush=True)
    subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=True)


def _newest_audit(store: Store) -> str:
    """The newest committed audit of the demo; empty without one."""
    audits = (entry.version for entry in reversed(catalog.read_all(store)) if entry.kind == "audit")
    return next((version for version in audits if manifests.committed(store, version)), "")


def photograph(store: Store, audit: str) -> None:
    """The audit's report, the reader, and a run on the live page and in Prefect's pages."""
    (report,) = Path(store.path(audit)).glob("*/report.html")
    with screenshots.open_browser() as browser:
        plain = browser.new_context(viewport=screenshots.SIZE)
        screenshots.shoot(plain, report.as_uri(), AUDIT / "report.png")
        reader = ("tasks.audit", "--root", store.root, "read", "runs/demo/trajectories/000050")
        with screenshots.open_app(*reader) as address:
            page = plain.new_page()
            page.goto(address)
            page.locator("td a.id").first.click()
            page.get_by_role("link", name="Tokens").click()
            page.wait_for_timeout(screenshots.SETTLE_MS)
            page.screenshot(path=AUDIT / "reader.png")
        with screenshots.open_app("flows.watch", "demo", "--root", store.root, "--per-hour", "2.5") as address:
            screenshots.shoot(plain, address, MAIN / "watch.png")
        with screenshots.open_prefect(browser) as (context, address):
            page = context.new_page()
            page.goto(f"{address}/runs")
            page.get_by_text("math-mt-ppo").first.wait_for()
            page.locator("a[href*='/runs/flow-run/']").last.click()
            page.get_by_text("Task Runs", exact=True).click()  # the log names folders of this machine
            page.wait_for_timeout(4 * screenshots.SETTLE_MS)
            page.screenshot(path=MAIN / "prefect.png")


if __name__ == "__main__":
    main()
