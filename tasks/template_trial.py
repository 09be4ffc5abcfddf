"""A process that renders a chat template under limits and may be killed: a template is a program of unknown origin.

    python -m tasks.template_trial < {"template": "…", "special_tokens": {…}, "conversations": [[message, …], …],
                                      "seconds": 10, "memory_mb": 512}

It prints a `TrialResult` as JSON. Every stage waits for it, so it imports little: only Jinja, configured as in
transformers (`tests/agents/test_chat.py` checks that both render the same).
"""

import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from storage.processes.limits import address_space, limited, prepare_for_limits

_DRAWS = 8
_CLOCKS = [datetime(2026, 1, 2, 3, 4, 5), datetime(2026, 1, 2, 16, 47, 58), datetime(2027, 11, 30, 16, 47, 58)]


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of rendering all conversations.

    Example: TrialResult(enough_memory=True, longest=2817, depends_on="the date")
    """

    enough_memory: bool
    longest: int  # characters of the longest text; 0 if the template refuses all
    depends_on: str  # besides the conversation: "chance", "the time of day", "the date", or ""


def try_out(template: str, special_tokens: Mapping[str, str], conversations: Sequence[Any]) -> TrialResult:
    """Render all conversations. A refusal is not reported: the caller meets it when it renders the template itself."""
    clock = [_CLOCKS[0]]
    render = partial(_render, make_environment(clock), template, special_tokens)
    try:
        longest = max(len(render(messages)) for messages in conversations)
        return TrialResult(True, longest, _depends_on(lambda: render(conversations[0]), clock))
    except MemoryError:
        return TrialResult(False, 0, "")


def make_environment(clock: Sequence[datetime]) -> ImmutableSandboxedEnvironment:
    """Return Jinja's environment as in transformers, except that the time is `clock[0]`."""

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda pattern: clock[0].strftime(pattern)
    return environment


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the assistant's text; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _render(
    environment: ImmutableSandboxedEnvironment, template: str, special_tokens: Mapping[str, str], messages: Any
) -> str:
    """Return the text; empty if the template refuses the conversation."""
    try:
        compiled = environment.from_string(template)
        return compiled.render(
            messages=messages, tools=None, documents=None, add_generation_prompt=True, **special_tokens
        )
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - templates may raise anything
        return ""


def _depends_on(render: Callable[[], str], clock: list[datetime]) -> str:
    """Return what else changes the text of the same conversation; empty if nothing does."""

    def seeded(seed: int) -> str:
        random.seed(seed)
        return render()

    if len({seeded(seed) for seed in range(_DRAWS)}) > 1:
        return "chance"
    texts = []
    for clock[0] in _CLOCKS:
        texts.append(seeded(0))
    first, later, other_day = texts
    if first != later:
        return "the time of day"
    return "the date" if later != other_day else ""


def main() -> None:
    prepare_for_limits()
    request = json.load(sys.stdin)
    with limited(request["seconds"], address_space() + request["memory_mb"] * 2**20):
        finding = try_out(request["template"], request["special_tokens"], request["conversations"])
    json.dump(asdict(finding), sys.stdout)


if __name__ == "__main__":
    main()
