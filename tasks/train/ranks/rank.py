"""The program of one rank: it joins the others, and carries out the orders that the first rank gets from the flow.

    RANK=… WORLD_SIZE=… MASTER_ADDR=… MASTER_PORT=… python -m tasks.train.ranks.rank CONFIG --rank-logs FOLDER

The flow starts the ranks of its own host; the first of all gets orders from it. Those of other hosts may be started by
whatever sets these four variables. Between orders the first rank says "wait" to the others every few seconds, so a rank
that is lost or hangs is noticed within `trainer.timeout_s` at any time.
"""

import argparse
import faulthandler
import json
import logging
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from configs import Config, ConfigError, load
from storage.errors import StorageError
from storage.processes.child import end_with_parent
from tasks.train.orders import DistanceOrder, UpdateOrder
from tasks.train.ranks.host import split_address
from tasks.train.ranks.messages import connect, receive, send
from tasks.train.version_trainer import VersionTrainer, host_scratch

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
BEAT_S = 2.0
"""The first rank says something to the others at least this often."""
_LEAVE_S = 10.0
"""Longest time in which a rank leaves the group, or tells why it failed."""
logger = logging.getLogger(__name__)


def main() -> None:
    end_with_parent()
    parser = argparse.ArgumentParser(prog="python -m tasks.train.ranks.rank", description="One rank of the trainer.")
    parser.add_argument("config", help="name of a configuration, or a YAML file's path")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides")
    parser.add_argument("--rank-logs", type=Path, required=True, help="folder for the logs of the ranks")
    parser.add_argument("--orders", help="the flow's socket, for the first rank")
    parser.add_argument("--meeting", type=Path, help="a file in which the ranks of one host meet, not at MASTER_PORT")
    parser.add_argument("--host", type=int, help="number of this host, if torchrun knows only the ranks of this one")
    arguments = parser.parse_args()
    if missing := [name for name in _VARIABLES if name not in os.environ]:
        parser.error(f"{', '.join(missing)} not set: what starts the ranks, such as torchrun, gives each its own")
    try:
        config = load(arguments.config, arguments.overrides)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    if arguments.host is not None:
        _number_across_hosts(config, arguments.host)
    _log_to(arguments.rank_logs / f"{_log_name()}.log")
    connection = connect(arguments.orders) if arguments.orders and os.environ["RANK"] == "0" else None
    status = _work(config, arguments, connection)
    logging.shutdown()
    # Without Python's own end: sometimes a thread of torch still runs then, and the C++ library aborts the process, so
    # that torchrun would report the loss of a rank that had ended well.
    os._exit(status)


def _number_across_hosts(config: Config, host: int) -> None:
    """Replace the variables of a torchrun that knows only the ranks of this host."""
    assert config.trainer.address
    address, port = split_address(config.trainer.address)
    number, of_host = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    values = host * of_host + number, config.trainer.hosts * of_host, address, port
    os.environ |= dict(zip(_VARIABLES, map(str, values), strict=True))


def _log_name() -> str:
    return f"rank-{int(os.environ['RANK']):05d}"


def _log_to(path: Path) -> None:
    """Send all output of this process to a file, also that of C libraries, and its logs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)


def _work(config: Config, arguments: argparse.Namespace, connection: Connection | None) -> int:
    """Carry out orders until the flow ends; return the exit status."""
    knobs, store = config.trainer, None
    try:
        from tasks.train.policy import device_of
        from tasks.train.ranks.group import meet, open_store, process_group, rank_and_size, take_gpu

        (rank, size), problem = rank_and_size(), ""
        with _ending_after(knobs.startup_timeout_s, "using the device"):
            device = device_of(config.ppo).type
            if device == "cuda":
                problem = take_gpu(rank % max(1, size // knobs.hosts))
        with _ending_after(2 * knobs.startup_timeout_s + _LEAVE_S, "waiting for the other ranks"):
            store = meet(open_store(knobs.hosts, knobs.startup_timeout_s, arguments.meeting), rank, size, problem)
        with process_group(device, store, knobs.timeout_s):
            _obey(config, device, connection)
            _end_soon(0)
        return 0
    except Exception as error:  # the flow raises it
        # The others notice the end of this process, so it tells its error before.
        _end_soon(1)
        logger.exception("this rank failed")
        _tell(error, arguments.rank_logs, store, connection)
        return 1


def _end_soon(status: int) -> None:
    """End this process in any case: without a connection to the other hosts, leaving the group may take forever."""
    timer = threading.Timer(_LEAVE_S, os._exit, [status])
    timer.daemon = True
    timer.start()


@contextmanager
def _ending_after(seconds: float, what: str) -> Iterator[None]:
    """End this process if the block lasts longer, whatever it does: the log then says where each thread was."""
    logger.info("%s; limit: %g s, from trainer.startup_timeout_s", what, seconds)
    faulthandler.dump_traceback_later(seconds, exit=True)  # needs no lock of Python, which a library may hold
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _obey(config: Config, device: str, connection: Connection | None) -> None:
    from tasks.train.mesh import Mesh
    from tasks.train.ranks.agreement import agree, broadcast, exchange
    from tasks.train.trainer import Trainer

    config = agree(config, device)
    with _ending_after(config.trainer.startup_timeout_s, "connecting the groups"):
        mesh = Mesh.of(config.ppo.parallel, device, config.trainer)
    if mesh.is_first_of_host:
        shutil.rmtree(host_scratch(config, mesh.host), ignore_errors=True)  # left by ranks that were killed
    trainer = VersionTrainer(config, Trainer.of(config, mesh), mesh)
    answer = _answerer(connection)

    def progress(line: str) -> None:
        answer({"kind": "progress", "text": line})

    answer({"kind": "ready"})
    while (order := broadcast(_next(connection)))["kind"] != "end":
        if order["kind"] == "update":
            made = trainer.update(UpdateOrder.read(order["order"]), progress, order["nonce"])
            files = [file for part in exchange([f.model_dump(mode="json") for f in made.files]) for file in part]
            answer({"kind": "done", "files": files, "metrics": made.metrics})
        elif order["kind"] == "distance":
            answer({"kind": "done", "distance": trainer.distance(DistanceOrder.read(order["order"]))})


def _next(connection: Connection | None) -> dict[str, Any]:
    """Return the flow's next order, or `wait` if there is none yet.

    Raises:
        EOFError: the flow has ended without the order `end`, so it has failed; other hosts wait for it to start again.
    """
    if connection is None:
        return {}  # not the first rank, which broadcasts
    return receive(connection) if connection.poll(BEAT_S) else {"kind": "wait"}


def _answerer(connection: Connection | None) -> Callable[[dict[str, Any]], None]:
    """Return a function that answers to the flow, in the first rank, or writes into the log; forward alarms, too."""
    if connection is None:
        return lambda message: logger.info("%s", message.get("text", message["kind"]))

    def answer(message: dict[str, Any]) -> None:
        send(connection, message)

    logging.getLogger("tasks").addHandler(_Forwarder(answer))
    return answer


class _Forwarder(logging.Handler):
    """Sends what the trainer logs to the flow."""

    def __init__(self, answer: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(logging.WARNING)
        self._answer = answer

    def emit(self, record: logging.LogRecord) -> None:
        self._answer({"kind": "log", "logger": record.name, "level": record.levelno, "text": self.format(record)})


def _tell(error: Exception, logs: Path, store: Any, connection: Connection | None) -> None:
    """Let the flow know the first error of all ranks, which may be another one than this rank's.

    The flow reads the files of the ranks on its own host; errors on other hosts reach it through the group's store and
    the first rank, which notices the end of the others.
    """
    first = own = {"kind": "error", "rank": int(os.environ["RANK"]), "time": time.time(), **_described(error)}
    own["met"] = store is not None
    written = logs / f"{_log_name()}.error.new"
    written.write_text(json.dumps(own))
    written.rename(logs / f"{_log_name()}.error.json")  # the flow reads all of it, or nothing
    try:
        if store is not None:
            first = json.loads(store.compare_set("error", "", json.dumps(own)))
        if connection is not None:
            send(connection, first)
    except Exception:  # the flow or the host of the store may be gone
        logger.warning("nobody to tell", exc_info=True)


def _described(error: Exception) -> dict[str, Any]:
    from torch.distributed import DistError

    kind = next((known.__name__ for known in (StorageError, ValueError) if isinstance(error, known)), "")
    lost = not kind and (isinstance(error, DistError) or "gloo" in str(error))
    text = f"{error}" if kind else "".join(traceback.format_exception_only(error)).strip()
    return {"type": kind, "text": text, "lost": lost, "traceback": traceback.format_exc()}


if __name__ == "__main__":
    main()
