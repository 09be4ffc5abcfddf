"""What a chat is made of, the ends that a model's files state, and which prompts leave room for an answer."""

import json
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from configs import load
from storage.objects.store import Store
from storage.records import Problem
from storage.versions.checkpoints import Checkpoint
from tasks.agents.chat import Chat, engine_ends, fetch_chat, load_chat, load_tokenizer
from tasks.agents.problem_checks import without_room

TEXT = "What is 12 + 30? It is \\boxed{42}."
LOADING = """
import sys
from pathlib import Path
from tasks.agents.chat import Chat, load_tokenizer
Chat(load_tokenizer(Path(sys.argv[1])))
print("torch" in sys.modules)
"""


def test_a_plain_tokenizer_is_loaded_without_torch(policy_folder: Path) -> None:
    """Each process that plays would need seconds for torch, and hundreds of megabytes."""
    command = [sys.executable, "-c", LOADING, str(policy_folder)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "False\n"
    loaded, found = load_tokenizer(policy_folder), AutoTokenizer.from_pretrained(policy_folder)
    assert type(loaded) is type(found)
    assert loaded.encode(TEXT) == found.encode(TEXT)
    assert loaded.init_kwargs == found.init_kwargs
    assert loaded.get_vocab() == found.get_vocab()


def test_a_chat_is_read_without_weights(policies: list[Checkpoint], checkpoint_store: Store, tmp_path: Path) -> None:
    """A process that plays through others' servers does not fetch them."""
    assert fetch_chat(checkpoint_store, policies[0].version, tmp_path) is load_chat(policies[0])
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_tokenizer_with_a_class_of_its_own_keeps_it(policy_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(policy_folder, tmp_path, dirs_exist_ok=True)
    stated = tmp_path / "tokenizer_config.json"
    stated.write_text(json.dumps(json.loads(stated.read_bytes()) | {"tokenizer_class": "Qwen2Tokenizer"}))
    assert type(load_tokenizer(tmp_path)).__name__ == "Qwen2Tokenizer"


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": 2}, {"eos_token_id": [5, 3]}, (5, 3)),
        ({"eos_token_id": 2}, {}, ()),
        ({"eos_token_id": None}, None, ()),
    ],
)
def test_the_engines_ends_are_those_of_the_models_files(
    config: dict[str, Any], generation: dict[str, Any] | None, ends: tuple[int, ...], tmp_path: Path
) -> None:
    """vLLM reads config.json only if there is no generation_config.json."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert engine_ends(tmp_path) == ends


SHORT = Problem("short", "What is 1 + 2?", ["3"])


def lacking(chat: Chat, problem: Problem, *overrides: str) -> bool:
    return without_room([SHORT, problem], chat, load("smoke", overrides)) == [problem]


def longest(chat: Chat, *overrides: str) -> Problem:
    """Return the problem with the longest prompt that has room."""
    lengths = (Problem(str(length), "1" * length, ["3"]) for length in range(1, 400))
    return next(before for before, after in pairwise(lengths) if lacking(chat, after, *overrides))


def tokens(chat: Chat, problem: Problem) -> int:
    return len(chat.prompt([{"role": "user", "content": problem.prompt}]))


@pytest.mark.parametrize(("max_new_tokens", "least"), [(15, 1), (80, 5)])
def test_room_is_a_sixteenth_of_an_answer(chat: Chat, max_new_tokens: int, least: int) -> None:
    """A prompt with less room is left out: its answers would all be cut, and count against the policy."""
    problem = longest(chat, f"sampling.max_new_tokens={max_new_tokens}")
    assert tokens(chat, problem) == 128 - least


def test_the_agents_own_messages_count(chat: Chat) -> None:
    """An agent that tells its first prompt has its system prompt and instruction counted."""
    alone = longest(chat)
    told = "agent.args={num_turns: 2, system_prompt: What is 1?, instruction: What is 2?}"
    assert lacking(chat, alone, told)
    assert tokens(chat, longest(chat, told)) < tokens(chat, alone) - 10
    assert not lacking(chat, alone, "agent={type: openai}")
    assert lacking(chat, Problem("long", "1" * 400, ["3"]), "agent={type: openai}")
