"""A local server that only its own user reaches, and root: connections of other users are closed at once.

A password alone would not do: whoever may connect can hold so many half requests open that nobody else is answered.
"""

import asyncio
import logging
import os
import socket
import struct
from functools import cache
from typing import Any

logger = logging.getLogger(__name__)

_DIAG, _BY_FAMILY, _REQUEST = 4, 20, 1  # NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST: linux/sock_diag.h
_HEADER, _TO_UID = 16, 64
"""Bytes of a netlink header, and of what is before the user in `inet_diag_msg` (linux/inet_diag.h)."""


def user_of(connected: tuple[str, int], to: tuple[str, int]) -> int | None:
    """Return the user who has connected an IPv4 address of this machine to another; None if the kernel tells nothing.

    Args:
        connected: host and port of the user's end.
        to: host and port of the server's end.
    """
    addresses = b"".join(socket.inet_aton(host).ljust(16, b"\0") for host, _ in (connected, to))
    pair = struct.pack("!HH", connected[1], to[1]) + addresses + struct.pack("=I8s", 0, b"\xff" * 8)
    body = struct.pack("=BBxxI", socket.AF_INET, socket.IPPROTO_TCP, 0xFFFFFFFF) + pair
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _DIAG) as kernel:
            kernel.settimeout(1.0)
            kernel.send(struct.pack("=IHHII", _HEADER + len(body), _BY_FAMILY, _REQUEST, 0, 0) + body)
            answer = kernel.recv(4096)
    except OSError:  # some sandboxes have no such sockets
        return None
    found = struct.unpack_from("=IH", answer)[1] == _BY_FAMILY
    return int(struct.unpack_from("=I", answer, _HEADER + _TO_UID)[0]) if found else None


def only_own() -> type[asyncio.Protocol]:
    """Return uvicorn's protocol (`http` of its `Config`) that closes connections of other users than this one and root.

    Where the kernel does not tell who connects, everybody can; then the password or key of the pages protects them.
    """
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class OwnProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            ends = [transport.get_extra_info(name) for name in ("peername", "sockname")]
            if (user := user_of(*ends)) not in (None, 0, os.getuid()):
                transport.abort()
                _tell(user)

    return OwnProtocol


@cache  # once for each user
def _tell(user: int | None) -> None:
    logger.warning("connections of the user %s are closed: this server is for the user %s and root", user, os.getuid())
