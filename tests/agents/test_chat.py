"""Chats are opened with the tokenizer that transformers finds, after a trial of its template in another process."""

import json
import logging
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import _compile_jinja_template

from storage.version_names import PolicyVersion
from storage.versions.checkpoints import Canary, Checkpoint
from storage.versions.manifests import File, Manifest
from tasks.agents import chat
from tasks.agents.chat import load_chat, load_tokenizer, open_chat
from tasks.template_trial import make_environment
from tasks.warm_start.tokenizer import CHAT_TEMPLATE
from tests.agents.test_templates import ALL, QUESTION, REFUSING, make_tokenizer

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (LOOP, "needs more than 1 s of processor time"),
        # The processor's speed decides which limit it reaches first.
        ("{{ lipsum(999999, html=false) }}", "needs more than (1 s of processor time|64 MB)"),
        ("{% if messages | length > 3 %}" + LOOP + "{% endif %}", "needs more than 1 s of processor time"),
        ("{% if messages[0].role == 'system' %}" + LOOP + "{% endif %}", "needs more than 1 s of processor time"),
        ("{% if '</think>' in messages[1].content %}" + LOOP + "{% endif %}", "needs more than 1 s of processor time"),
        ("{% if messages[-1].role == 'tool' %}" + LOOP + "{% endif %}", "needs more than 1 s of processor time"),
        ("{{ 'x' * 10 ** 10 }}", "needs more than 64 MB"),
        ("{% for i in range(999) %}{{ 'x' * 10 ** 6 }}{% endfor %}", "needs more than 64 MB"),
        ("{{ 'x' * 1500000 }}", "writes 1,5.*characters for a short conversation"),
        ("{{ strftime_now('%H:%M:%S') }}", "depends on the time of day"),
        ("{{ [1, 2, 3, 4] | random }}", "depends on chance"),
    ],
)
def test_a_template_that_exceeds_a_limit_is_refused(
    written: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is refused before the stage's process renders it, and the error names its model and the remedy."""
    monkeypatch.setattr(chat, "_SECONDS", 1.0)
    monkeypatch.setattr(chat, "_MEMORY_MB", 64)
    tokenizer = make_tokenizer(written + CHAT_TEMPLATE)
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model/config.json").write_text("{}")
    file = File(
        name="model/tokenizer.json", path="x", bytes=0, rows=None, sha256=str(tmp_path)
    )  # nothing is cached for this digest
    manifest = Manifest.model_construct(files=[file])
    policy = Checkpoint(
        PolicyVersion("runs/r/checkpoints/000003"), 3, tmp_path / "model", None, Canary([], []), manifest
    )
    with pytest.raises(ValueError, match=rf"^the chat template of {tmp_path}/model .*{message}.* repair chat_template"):
        load_chat(policy)


def test_a_template_that_writes_the_date_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Some families of models write the date, so their prompts change at midnight. A warning is enough."""
    with caplog.at_level(logging.WARNING, "tasks.agents"):
        open_chat(make_tokenizer("{{ strftime_now('%d %b %Y') }}" + CHAT_TEMPLATE))
        open_chat(make_tokenizer(CHAT_TEMPLATE))
    assert [record.getMessage() for record in caplog.records] == [
        "the chat template of  writes the date: the same conversation has other tokens on another day"
    ]


def test_a_refusal_of_a_template_is_reported_where_it_is_used() -> None:
    """The trial looks for loops and large texts only. A refused conversation is an error when it is rendered."""
    assert open_chat(make_tokenizer(REFUSING)).prompt([QUESTION])
    with pytest.raises(ValueError, match="refuses a conversation of user: no"):
        open_chat(make_tokenizer("{{ raise_exception('no') }}"))
    with pytest.raises(ValueError, match="no chat template"):
        open_chat(make_tokenizer(None))


def test_a_template_is_tried_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage starts one process for the trial, not one in each iteration."""
    chat._try_out.cache_clear()
    open_chat(make_tokenizer(CHAT_TEMPLATE))
    monkeypatch.setattr(subprocess, "run", None)
    open_chat(make_tokenizer(CHAT_TEMPLATE))


def test_templates_are_tried_out_as_transformers_renders_them() -> None:
    """The trial avoids transformers, which takes seconds to import, but its Jinja environment must be the same."""
    own, theirs = make_environment([datetime(2026, 1, 2)]), _compile_jinja_template("").environment
    for names in ("filters", "globals", "tests"):
        assert getattr(own, names).keys() == getattr(theirs, names).keys()
    options = ("trim_blocks", "lstrip_blocks", "keep_trailing_newline", "autoescape", "intercepted_binops")
    assert [getattr(own, name) for name in options] == [getattr(theirs, name) for name in options]
    tags = [{tag for extension in each.extensions.values() for tag in extension.tags} for each in (own, theirs)]
    assert tags[0] == tags[1]


SYNTAX = (
    "{%- for m in messages %}\n  {% if loop.index > 3 %}{% break %}{% endif %}\n{{ bos_token }}{{ m | tojson }}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ {'ö': '<'} | tojson(indent=1) }}"
)


@pytest.mark.parametrize("name", [*ALL, "syntax"])
def test_a_trial_writes_what_transformers_writes(name: str) -> None:
    """Both renderings are equal character by character."""
    template = {**ALL, "syntax": SYNTAX}[name]
    tokenizer, environment = make_tokenizer(template), make_environment([datetime(2026, 1, 2)])
    compiled = environment.from_string(template)
    for messages in [[QUESTION], [QUESTION, {"role": "assistant", "content": "<think>x</think>4"}, QUESTION]]:
        own = compiled.render(messages=messages, add_generation_prompt=True, **tokenizer.special_tokens_map)
        assert own == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


TEXT = "What is 12 + 30? It is \\boxed{42}."
LOADING = """
import sys
from pathlib import Path
from tasks.agents.chat import load_tokenizer
from tasks.agents.chat import open_chat
open_chat(load_tokenizer(Path(sys.argv[1])))
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


def test_a_tokenizer_with_a_class_of_its_own_keeps_it(policy_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(policy_folder, tmp_path, dirs_exist_ok=True)
    stated = tmp_path / "tokenizer_config.json"
    stated.write_text(json.dumps(json.loads(stated.read_bytes()) | {"tokenizer_class": "Qwen2Tokenizer"}))
    assert type(load_tokenizer(tmp_path)).__name__ == "Qwen2Tokenizer"
