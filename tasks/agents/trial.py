"""A trial of chat templates in a separate process, before the pipeline renders them in its own."""

import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.agents.chat import Chat
from tasks.agents.control.written import toys
from tasks.agents.template import REMEDY
from tasks.limits import OUT_OF_TIME
from tasks.template_trial import TrialResult

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_ROOT = Path(__file__).parents[2]
_SECONDS, _MEMORY_MB = 10.0, 512
"""Limits for all conversations together: processor time, and memory above that of an idle process.

Real templates need 0.1 s.
"""
_PATIENCE_S = 600.0
"""Wall-clock limit, only against a process that waits for ever; a busy machine does not change the result."""
_LONGEST = 1_000_000
"""Most characters of a rendered conversation; normally those of the trial have some thousands."""


def open_chat(tokenizer: "PreTrainedTokenizerBase", vocabulary: int | None = None, ends: Sequence[int] = ()) -> Chat:
    """Try out the template of a tokenizer from outside this project; return its chat (arguments as in `Chat`).

    The template first renders conversations of every shape in a separate process, with limits on processor time and
    memory. A template that passes may still loop in a real conversation, where nothing limits it.

    Raises:
        ValueError: the template is missing, does not end, needs too much memory, writes different texts for the same
            conversation, does not show all messages, or refuses a conversation; names the tokenizer and the remedy.
    """
    template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    if template:
        _try_out(tokenizer.name_or_path, template, tuple(sorted(tokenizer.special_tokens_map.items())))
    return Chat(tokenizer, vocabulary, ends)


@lru_cache(maxsize=8)
def _try_out(name: str, template: str, special_tokens: tuple[tuple[str, str], ...]) -> None:
    label = f"the chat template of {name}"
    finding = _render_in_process(label, template, dict(special_tokens))
    if not finding.enough_memory:
        raise ValueError(f"{label} needs more than {_MEMORY_MB} MB for a short conversation: {REMEDY}")
    if finding.longest > _LONGEST:
        raise ValueError(f"{label} writes {finding.longest:,} characters for a short conversation: {REMEDY}")
    if finding.depends_on == "the date":
        logger.warning("%s writes the date: the same conversation has other tokens on another day", label)
    elif finding.depends_on:
        raise ValueError(
            f"{label} writes text that depends on {finding.depends_on}: the policy would get another text than the "
            f"one in its trajectory; {REMEDY}"
        )


def _render_in_process(label: str, template: str, special_tokens: dict[str, str]) -> TrialResult:
    request = {
        "template": template,
        "special_tokens": special_tokens,
        "conversations": _conversations(),
        "seconds": _SECONDS,
        "memory_mb": _MEMORY_MB,
    }
    command = [sys.executable, "-m", "tasks.template_trial"]
    try:
        process = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, cwd=_ROOT, timeout=_PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"{label} was not rendered within {_PATIENCE_S:g} s: {REMEDY}") from None
    if process.returncode == OUT_OF_TIME:
        raise ValueError(f"{label} needs more than {_SECONDS:g} s of processor time for a short conversation: {REMEDY}")
    if process.returncode:
        raise ValueError(f"{label} ended the process that rendered it ({process.returncode}): {process.stderr[-500:]}")
    return TrialResult(**json.loads(process.stdout))


def _conversations() -> list[list[dict[str, Any]]]:
    """Return conversations with and without a system prompt, of one to four turns, with and without thoughts or calls.

    The plainest comes first.
    """
    conversations = list[list[dict[str, Any]]]()
    for system in ([], [{"role": "system", "content": "Be brief."}]):
        for completion in (r"So it is \boxed{4}.", "<think>\nHmm\n</think>\n\n\\boxed{4}"):
            question = {"role": "user", "content": "What is 1 + 2?\nReason step by step."}
            messages: list[dict[str, Any]] = [*system, question]
            for _ in range(4):
                conversations.append(messages)
                feedback = {"role": "user", "content": "Your answer is wrong. Try again."}
                messages = [*messages, {"role": "assistant", "content": completion}, feedback]
    return [*conversations, *toys()]
