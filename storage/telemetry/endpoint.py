"""The endpoint `/metrics`, for Prometheus on the same machine: on the loopback interface, without password.

Every user of the machine can read it. It answers one connection at a time, so that nobody takes more than one file of
this process, and gives each a second to ask: who connects again and again delays other readers, and nothing else.
"""

import contextlib
import logging
import socket
import threading
from functools import cache
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import make_wsgi_app

from storage.telemetry.metrics import REGISTRY
from storage.telemetry.spans import export_spans

logger = logging.getLogger(__name__)


_REQUEST_S = 1.0
"""Most time for a request to arrive, also byte by byte."""


class _Handler(WSGIRequestHandler):
    timeout = 5.0  # seconds to take the answer

    def handle(self) -> None:
        late = threading.Timer(_REQUEST_S, self._end_request)
        late.start()
        try:
            super().handle()
        finally:
            late.cancel()

    def _end_request(self) -> None:
        """Read no more; an answer on its way is still written."""
        with contextlib.suppress(OSError):  # it has just been closed
            self.connection.shutdown(socket.SHUT_RD)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # the name of the overridden method's
        """Log nothing: a scrape every few seconds is no news."""


def publish(port: int | None, run: str) -> None:
    """Label the numbers of this process with a run, and serve them at a port until it ends; export its spans, too."""
    REGISTRY.run = run
    export_spans()
    if port is not None:
        serve(port)


@cache
def serve(port: int) -> str | None:
    """Serve the numbers of this process until it ends; return the URL. Port 0: a free one.

    A port that is taken is only logged, because a night must not fail for want of a watcher.
    """
    try:
        server = make_server("127.0.0.1", port, make_wsgi_app(REGISTRY), handler_class=_Handler)
    except OSError as error:
        text = "no metrics: monitoring.prometheus=%d: %s. If another flow run serves there, choose another port"
        logger.warning(text, port, error.strerror)
        return None
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/metrics"
