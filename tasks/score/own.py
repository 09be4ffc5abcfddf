"""One's own scorer: a function of a user, which runs in the verifier's workers, under their limits.

    def score(answer: Answer, *, bonus: float = 0.1) -> Verdict:
        right = answer.text.strip() == answer.metadata["gold"]
        return Verdict("correct" if right else "wrong", reward=right + bonus, parts={"bonus": bonus})

With `score.type=my_package.my_module:score`. A function that only decides may return True or False, or 1 or 0. Metadata
that no agent may see are named in an attribute of the function, below it: `score.private = ["gold"]`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any, get_type_hints

from pydantic import BaseModel, ValidationError, create_model

from storage.records import VerdictName
from tasks.registry import described_with_place
from tasks.score.interface import Answer, ScorerContext
from tasks.score.verdict import Verdict, checked, storable

COLUMNS = ("problem_id", "status", "prompt", "solutions", "metadata", "calls", "follows", "reward_parts")


class OwnScorer:
    """A scorer that calls the function `name` (`package.module:function`) with an answer and `args`."""

    columns: Sequence[str] = COLUMNS
    version = 1

    def __init__(self, context: ScorerContext, name: str, args: Mapping[str, Any]) -> None:
        self._verifier, self._name, self._args = context.verifier, name, dict(args)

    def judge(self, answers: Sequence[Answer]) -> list[Verdict]:
        return self._verifier.call(self._name, [(answer, self._args) for answer in answers])


def call(function: Callable[..., Any], answer: Answer, args: Mapping[str, Any]) -> Verdict:
    """Call a user's function in a worker; an exception, or a result that is no verdict, becomes an `error`."""
    try:
        return _verdict(function(answer, **args))
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001 - a user's code raises anything, which costs only its turn
        return Verdict("error", reason=storable(described_with_place(error)))


def _verdict(result: Any) -> Verdict:
    if isinstance(result, Verdict):
        valid = _validated(result)
        texts = {name: storable(getattr(valid, name)) for name in ("extracted", "solution", "reason")}
        return checked(Verdict(valid.name, **texts, reward=valid.reward, parts=valid.parts))
    if result in (0, 1):  # also True and False, of numpy, too
        return Verdict("correct" if result else "wrong")
    raise TypeError(
        f"the function returned {result!r:.80}: return True or False, or a Verdict, "
        "which says whether the turn is right and what it earns"
    )


def _validated(verdict: Verdict) -> Verdict:
    try:
        return Verdict(**_fields().model_validate(asdict(verdict)).model_dump())
    except ValidationError as error:
        first = error.errors()[0]
        raise TypeError(f"{first['loc'][0]}={first['input']!r:.80} of the verdict: {first['msg']}") from None


@cache
def _fields() -> type[BaseModel]:
    """Make a model that checks the types of a verdict's fields, which nobody has checked in a user's function."""
    hints = get_type_hints(Verdict, localns={"VerdictName": VerdictName})
    fields: dict[str, Any] = {name: (hint, ...) for name, hint in hints.items()}
    return create_model("Fields", **fields)
