"""The chat of the tiny policy, and one in the format of Qwen 3."""

from pathlib import Path

import pytest

from tasks.agents.chat import Chat
from tests.support.qwen3_tokenizer import build_qwen3_tokenizer


@pytest.fixture(scope="module")
def chat(policy_folder: Path) -> Chat:
    from transformers import AutoTokenizer

    return Chat(AutoTokenizer.from_pretrained(policy_folder))


@pytest.fixture(scope="module")
def qwen3() -> Chat:
    return Chat(build_qwen3_tokenizer())
