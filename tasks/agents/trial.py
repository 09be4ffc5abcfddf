"""Chat templates are tried out before they are rendered in a process that matters."""

import json
import logging
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.agents.chat import Chat
from tasks.agents.template import REMEDY, Message
from tasks.limits import OUT_OF_TIME
from tasks.template_trial import Finding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_ROOT = Path(__file__).parents[2]
_SECONDS, _MEMORY_MB = 10.0, 512
"""Limits for all conversations together: processor time, and memory beyond an idle process. Real ones need 0.1 s."""
_PATIENCE_S = 600.0
"""By the clock: only against a process that waits for ever; a busy machine changes no verdict."""
_LONGEST = 1_000_000
"""Characters of a rendered conversation; those that are tried out have some thousands."""


def open_chat(tokenizer: "PreTrainedTokenizerBase", vocabulary: int | None = None) -> Chat:
    """The chat of a tokenizer from elsewhere; `vocabulary` as in `Chat`.

    Its template first renders conversations of every shape in a process of its own, with limits of processor time and
    memory. A real conversation may still make a template loop that renders all of these: nothing limits that here.

    Raises:
        ValueError: the template does not end, needs too much memory, writes another text each time, does not show
            what is said, refuses a conversation, or there is none; says whose template, and what to do.
    """
    template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    if template:
        _try_out(tokenizer.name_or_path, template, tuple(sorted(tokenizer.special_tokens_map.items())))
    return Chat(tokenizer, vocabulary)


@lru_cache(maxsize=8)
def _try_out(name: str, template: str, special_tokens: tuple[tuple[str, str], ...]) -> None:
    whose = f"the chat template of {name}"
    finding = _find(whose, template, dict(special_tokens))
    if not finding.enough_memory:
        raise ValueError(f"{whose} needs more than {_MEMORY_MB} MB for a short conversation: {REMEDY}")
    if finding.longest > _LONGEST:
        raise ValueError(f"{whose} makes {finding.longest:,} characters of a short conversation: {REMEDY}")
    if finding.depends_on == "the date":
        logger.warning("%s writes the date: the same conversation has other tokens on another day", whose)
    elif finding.depends_on:
        raise ValueError(
            f"{whose} writes what depends on {finding.depends_on}: the policy would be given another text than the one "
            f"that stands in its trajectory; {REMEDY}"
        )


def _find(whose: str, template: str, special_tokens: dict[str, str]) -> Finding:
    given = {
        "template": template,
        "special_tokens": special_tokens,
        "conversations": _conversations(),
        "seconds": _SECONDS,
        "memory_mb": _MEMORY_MB,
    }
    command = [sys.executable, "-m", "tasks.template_trial"]
    try:
        done = subprocess.run(
            command, input=json.dumps(given), capture_output=True, text=True, cwd=_ROOT, timeout=_PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"{whose} was not rendered within {_PATIENCE_S:g} s: {REMEDY}") from None
    if done.returncode == OUT_OF_TIME:
        raise ValueError(f"{whose} needs more than {_SECONDS:g} s of processor time for a short conversation: {REMEDY}")
    if done.returncode:
        raise ValueError(f"{whose} ended the process that rendered it ({done.returncode}): {done.stderr[-500:]}")
    return Finding(**json.loads(done.stdout))


def _conversations() -> list[list[Message]]:
    """With and without a system prompt, of one to four turns, with and without thoughts; the plainest comes first."""
    found = []
    for system in ([], [{"role": "system", "content": "Be brief."}]):
        for said in (r"So it is \boxed{4}.", "<think>\nHmm\n</think>\n\n\\boxed{4}"):
            messages = [*system, {"role": "user", "content": "What is 1 + 2?\nReason step by step."}]
            for _ in range(4):
                found.append(messages)
                answer = {"role": "user", "content": "Your answer is wrong. Try again."}
                messages = [*messages, {"role": "assistant", "content": said}, answer]
    return found
