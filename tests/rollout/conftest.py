"""The chat of the tiny policy."""

from pathlib import Path

import pytest

from tasks.agents.chat import Chat


@pytest.fixture(scope="module")
def chat(policy_folder: Path) -> Chat:
    from transformers import AutoTokenizer

    return Chat(AutoTokenizer.from_pretrained(policy_folder))
