"""Messages between the flow and the first rank: JSON over a socket in a folder that no other user may enter."""

import json
import socket
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def listen(path: Path) -> socket.socket:
    """Open the flow's end."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(1)
    return listener


def accept(listener: socket.socket, timeout_s: float) -> Connection | None:
    """Return the connection of the first rank; None if it does not come in time."""
    listener.settimeout(timeout_s)
    try:
        connected, _ = listener.accept()
    except TimeoutError:
        return None
    connected.setblocking(True)
    return Connection(connected.detach())


def connect(path: str) -> Connection:
    """Open the first rank's end."""
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(path)
    return Connection(connected.detach())


def send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> dict[str, Any]:
    """Return the next message. Raises EOFError if the other end is closed."""
    message: dict[str, Any] = json.loads(connection.recv_bytes())
    return message
