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
def far_away() -> Iterator[list[str]]:
    """Yield the hosts beyond this machine that this process looks up or connects to; at the end there are none."""
    hosts: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.connect" and isinstance(arguments[1], tuple):
            hosts.append(str(arguments[1][0]))
        elif event == "socket.getaddrinfo":
            hosts.append(str(arguments[0]))
        hosts[:] = [host for host in hosts if host not in LOCAL]

    sys.addaudithook(note)  # it stays until the process ends
    yield hosts
    assert hosts == []
