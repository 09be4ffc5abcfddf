"""A chat format with tools, and a record of the addresses that frameworks reach for."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tasks.agents.chat import Chat
from tests.support.qwen3_tokenizer import build_qwen3_tokenizer

LOCAL = ("127.0.0.1", "::1", "localhost")


@pytest.fixture(scope="session")
def chat() -> Chat:
    return Chat(build_qwen3_tokenizer())


@pytest.fixture(scope="session")
def hosts() -> list[str]:
    """Return a growing list of the hosts beyond this machine that this process looks up or connects to."""
    hosts: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.connect" and isinstance(arguments[1], tuple):
            host = str(arguments[1][0])
        elif event == "socket.getaddrinfo":
            host = str(arguments[0])
        else:
            return
        if host not in LOCAL:
            hosts.append(host)

    sys.addaudithook(note)  # it stays until the process ends
    return hosts


@pytest.fixture(scope="module")
def far_away(hosts: list[str]) -> Iterator[list[str]]:
    """Yield the hosts that the tests of a file reach for; at its end there are none."""
    hosts.clear()  # those of other files
    yield hosts
    assert hosts == []
