"""Configurations as they were stored, in the words of this program's schema.

A manifest or a night holds the configuration of the program that wrote it, and is never rewritten. Whoever reads it
brings it up to date: `MIGRATIONS` first, in order, then the default of every knob that it lacks. So the default of a
new knob must keep the behaviour from before it.
"""

import copy
import typing
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python

from configs.loader import ConfigError, explain
from configs.plain import brief
from configs.schema import Config
from configs.sections import section_of

Values = dict[str, Any]
Migration = Callable[[Values], None]
"""Changes a whole configuration in place, and changes nothing in one that is already up to date."""

_ABSENT = object()


def renamed(old: str, new: str, value: Callable[[Any], Any] = lambda value: value) -> Migration:
    """The knob `old` is called `new`; `value` makes the new value of the old one.

    A stored configuration does not say which schema it follows. So a knob whose values come to mean something else
    is renamed, too: `renamed("run.max_minutes", "run.max_seconds", lambda minutes: 60 * minutes)`.
    """

    def migrate(values: Values) -> None:
        if (found := _pop(values, old)) is not _ABSENT:
            _put(values, new, value(found))

    return migrate


def removed(key: str, without: Any) -> Migration:
    """There is no knob `key`: the program does what it did where its value was `without`.

    Another value stays, so that a run that was begun with it is refused: `removed("rollout.eager", without=False)`.
    """

    def migrate(values: Values) -> None:
        if (found := _pop(values, key)) not in (_ABSENT, without):
            _put(values, key, found)

    return migrate


def changed(key: str, value: Callable[[Any], Any]) -> Migration:
    """The knob or section `key` has other values, and the old ones are no values of today: `value` makes them new.

    Also for a section of several forms: `changed("problems.train", …)`.
    """

    def migrate(values: Values) -> None:
        if (found := _pop(values, key)) is not _ABSENT:
            _put(values, key, value(found))

    return migrate


def _kl(section: Any) -> Any:
    """`place: none` meant that there is no penalty, whatever the other knobs said."""
    return {} if isinstance(section, dict) and section.get("place") == "none" else section


def _evaluation(section: Any) -> Any:
    """Convert a section from when `temperature: 0` made all `samples` greedy."""
    greedy = isinstance(section, dict) and section.get("temperature") == 0
    return {**section, "samples": 0, "temperature": 1.0} if greedy else section


def _place(path: Any) -> Any:
    """The empty path meant the folder in which a command was started."""
    return "." if path == "" else path


MIGRATIONS: Sequence[Migration] = (
    renamed("ppo.minibatches", "ppo.ppo_n_minibatches"),
    renamed("ppo.behaviour_weight_cap", "ppo.behaviour_weight.cap"),
    changed("ppo.kl", _kl),
    changed("evaluation", _evaluation),
    changed("storage.root", _place),
    changed("storage.cache", _place),
)
"""Oldest first. Nothing is ever taken out: the stores of then are still there."""


def up_to_date(values: Values, migrations: Sequence[Migration] = MIGRATIONS) -> Values:
    """A stored configuration as this program would have written it; what this program does not know stays in it.

    >>> up_to_date({"ppo": {"minibatches": 2}})["ppo"]["ppo_n_minibatches"]
    2
    """
    values = copy.deepcopy(values)
    for migrate in migrations:
        migrate(values)
    return _filled(Config, values)


def read_stored(values: Values, what: str) -> Config:
    """A stored configuration as one to work with; `what` it is of is told in errors.

    Raises:
        ConfigError: it holds knobs or values that this program does not know.
    """
    try:
        return Config.model_validate(up_to_date(values))
    except ValidationError as error:
        lines = "\n".join(f"  {explain(detail)}" for detail in error.errors())
        raise ConfigError(
            f"the stored configuration of {what} is none that this program can work with:\n{lines}\n"
            "Where a newer program wrote it, upgrade this one"
        ) from None


def unknown(values: Values) -> list[str]:
    """Knobs of a configuration that is up to date, but that this program does not know, as `key=value`."""
    try:
        Config.model_validate(values)
    except ValidationError as error:
        found = [detail for detail in error.errors() if detail["type"] == "extra_forbidden"]
        return [f"{'.'.join(str(part) for part in detail['loc'])}={brief(detail['input'])}" for detail in found]
    return []


def _filled(model: type[BaseModel], values: Values) -> Values:
    """`values` of a section with the defaults of all knobs that they lack."""
    known = {}
    for name, field in model.model_fields.items():
        if name in values:
            known[name] = _inside(field.annotation, values[name])
        elif not field.is_required():
            known[name] = to_jsonable_python(field.get_default(call_default_factory=True))
    return values | known


def _inside(annotation: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if typing.get_origin(annotation) is dict:
        return {name: _inside(typing.get_args(annotation)[1], each) for name, each in value.items()}
    section = section_of(annotation, value)
    return _filled(section, value) if section else value


def _pop(values: Values, key: str) -> Any:
    """Take the value at a dotted key out; `_ABSENT` where there is none."""
    *path, name = key.split(".")
    section: Any = values
    for part in path:
        section = section.get(part) if isinstance(section, dict) else None
    return section.pop(name, _ABSENT) if isinstance(section, dict) else _ABSENT


def _put(values: Values, key: str, value: Any) -> None:
    *path, name = key.split(".")
    for part in path:
        values = values.setdefault(part, {})
    values[name] = value
