"""A chat format with tools."""

import pytest

from tasks.agents.chat import Chat
from tests.support.qwen3_tokenizer import build_qwen3_tokenizer


@pytest.fixture(scope="session")
def chat() -> Chat:
    return Chat(build_qwen3_tokenizer())
