"""Problems whose text reads like control tokens."""

from collections.abc import Sequence

from storage.records import Problem
from tasks.agents.control.tokens import ControlTokens
from tasks.problems.messages import first_messages

_NAMED = 5


def describe_marked(problems: Sequence[Problem], control: ControlTokens) -> str | None:
    """Return a warning that names the problems in which control tokens are spelled out; None if there are none."""
    marked = [problem.problem_id for problem in problems if _is_marked(problem, control)]
    if not marked:
        return None
    others = [f"and {len(marked) - _NAMED} more"] if len(marked) > _NAMED else []
    return (
        f"{len(marked)} of {len(problems)} problems spell out tokens of the chat format, such as <|im_end|> "
        f"({', '.join([*marked[:_NAMED], *others])}): the policy reads them as text; look whether they belong there"
    )


def _is_marked(problem: Problem, control: ControlTokens) -> bool:
    messages = first_messages(problem, problem.prompt)
    return any(control.found_in(text) for text in (problem.prompt, *(message["content"] for message in messages)))
