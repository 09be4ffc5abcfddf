import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import Queue

import pytest

from tests.support.paths import ROOT
from tests.support.prefect_services import PATIENCE_S, PrefectServer

pytestmark = pytest.mark.slow

PAGE = (ROOT / "tasks/retrain/README.md").read_text()
BLOCK = """\
from prefect.blocks.webhook import Webhook

hook = Webhook(url="{url}", headers={{"Content-Type": "application/json", "Authorization": "Bearer secret"}})
print(hook.save("serving", overwrite=True))
"""


def automation(block: str) -> str:
    """Return the automation of the README."""
    match = re.search(r"```yaml\n# tell-serving.yaml\n(.*?)```", PAGE, re.DOTALL)
    assert match
    return match[1].replace("BLOCK-ID", block)


EMIT = """\
from prefect.events import emit_event

resource = {"prefect.resource.id": "math-mt-ppo.retraining.nightly"}
emit_event("math-mt-ppo.retrain.rejected", resource, payload={"version": 6})
emit_event("math-mt-ppo.retrain.promoted", resource, payload={"version": 7, "note": 'better: "yes" <b>'})
"""


@contextmanager
def listener() -> Iterator[tuple[str, "Queue[tuple[str | None, bytes]]"]]:
    """Yield the URL of a web server, and a queue with the authorization and body of each POST that it gets."""
    received: Queue[tuple[str | None, bytes]] = Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.put((self.headers["Authorization"], self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", received
        finally:
            server.shutdown()


def test_an_automation_calls_a_webhook_with_the_payload_of_an_event(tmp_path: Path) -> None:
    """The README's automation works, and a process that ends right after `emit_event` has sent its event."""
    with listener() as (url, received), PrefectServer(tmp_path / "prefect") as server:
        block = server.python(tmp_path, BLOCK.format(url=url)).strip()
        (tmp_path / "automation.yaml").write_text(automation(block))
        server.prefect(tmp_path, "automation", "create", "--from-file", "automation.yaml")
        server.python(tmp_path, EMIT)
        authorization, body = received.get(timeout=PATIENCE_S)
        assert authorization == "Bearer secret"
        assert json.loads(body) == {"version": 7, "note": 'better: "yes" <b>'}
        assert received.empty()
