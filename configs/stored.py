"""Converts stored configurations to the schema of this program.

A manifest or a night holds the configuration of the program that wrote it, and is never rewritten. Readers bring it up
to date: they apply `MIGRATIONS` in order and then add every missing knob, with its value in `BEFORE` or else its
default. So a new knob whose default is not the behaviour from before it needs a line in `BEFORE`.

Example: {"ppo": {"minibatches": 2}} becomes {"ppo": {"ppo_n_minibatches": 2, "eps_clip": 0.2, …}, …}
"""

import copy
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python

from configs.knobs import section_of
from configs.loader import ConfigError, explain
from configs.safety import brief
from configs.schema import Config

Values = dict[str, Any]
Migration = Callable[[Values], None]
"""Changes a whole configuration in place, and changes nothing in one that is already up to date."""

_ABSENT = object()


def renamed(old: str, new: str, value: Callable[[Any], Any] = lambda value: value) -> Migration:
    """Return a migration that renames the knob `old` to `new` and converts its value with `value`.

    A stored configuration does not say which schema it follows. So a knob whose values change their meaning is renamed,
    too: `renamed("run.max_minutes", "run.max_seconds", lambda minutes: 60 * minutes)`.
    """

    def migrate(values: Values) -> None:
        if (stored := _pop(values, old)) is not _ABSENT:
            _put(values, new, value(stored))

    return migrate


def removed(key: str, without: Any) -> Migration:
    """Return a migration for a removed knob `key`: the program now always behaves as with the value `without`.

    Another value stays, so a run that was begun with it is refused: `removed("rollout.eager", without=False)`.
    """

    def migrate(values: Values) -> None:
        if (stored := _pop(values, key)) not in (_ABSENT, without):
            _put(values, key, stored)

    return migrate


def changed(key: str, value: Callable[[Any], Any]) -> Migration:
    """Return a migration that converts old values of the knob or section `key` with `value`.

    Use it only if no old value is a valid new one. It also works for a section of several forms:
    `changed("problems.train", …)`.
    """

    def migrate(values: Values) -> None:
        if (stored := _pop(values, key)) is not _ABSENT:
            _put(values, key, value(stored))

    return migrate


def _kl(section: Any) -> Any:
    """Convert a section in which `place: none` meant no penalty, whatever the other knobs were."""
    return {} if isinstance(section, dict) and section.get("place") == "none" else section


def _evaluation(section: Any) -> Any:
    """Convert a section in which `temperature: 0` made all `samples` greedy."""
    greedy = isinstance(section, dict) and section.get("temperature") == 0
    return {**section, "samples": 0, "temperature": 1.0} if greedy else section


def _place(path: Any) -> Any:
    """Convert the empty path, which meant the current folder of the command."""
    return "." if path == "" else path


MIGRATIONS: Sequence[Migration] = (
    renamed("ppo.minibatches", "ppo.ppo_n_minibatches"),
    renamed("ppo.behaviour_weight_cap", "ppo.behaviour_weight.cap"),
    changed("ppo.kl", _kl),
    changed("evaluation", _evaluation),
    changed("storage.root", _place),
    changed("storage.cache", _place),
)
"""All migrations, oldest first. None is ever removed, because old stores still exist."""

BEFORE: Mapping[str, Any] = {
    "ppo.advantage.baseline": "turn",
    "ppo.advantage.bound": None,
    "ppo.advantage.credit": "order",
    "ppo.advantage.scale_penalties": True,
    "ppo.behaviour_weight.cap": None,
    "ppo.c_clip": None,
    "problems.without_room": "play",
    "retrain.gate.max_by_luck": None,
    "reward.shape": "success",
    "reward.unfinished": "leave-out",
    "rollout.allow_own_sampling": True,
    "score.reading": "library",
    "score.success": "reward",
}
"""Knobs whose default is another behaviour than that of the programs before the knob, and the value for the latter."""


def up_to_date(values: Values, migrations: Sequence[Migration] = MIGRATIONS) -> Values:
    """Convert a stored configuration to this program's schema; knobs and values that it does not know stay in it.

    >>> up_to_date({"ppo": {"minibatches": 2}})["ppo"]["ppo_n_minibatches"]
    2
    """
    values = copy.deepcopy(values)
    for migrate in migrations:
        migrate(values)
    for key, value in BEFORE.items():
        _put_missing(values, key, value)
    return _filled(Config, values)


def as_begun(config: Config, begun: Values) -> Config:
    """Return the configuration of a run that continues: knobs of `BEFORE` that it does not set stay as the run `begun`.

    So a run that was begun by an older program continues as it began, with the YAML file that it was begun with.
    """
    for key in BEFORE:
        if not _is_set(config, path := key.split(".")) and (value := _get(begun, path)) is not _ABSENT:
            config = _copy_with(config, path, value)
    return config


def _is_set(section: Any, path: Sequence[str]) -> bool:
    """Return whether a knob was given, and is not a default."""
    name, *rest = path
    return name in section.model_fields_set and (not rest or _is_set(getattr(section, name), rest))


def _copy_with(section: Any, path: Sequence[str], value: Any) -> Any:
    name, *rest = path
    inner = _copy_with(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: inner})


def read_stored(values: Values, what: str) -> Config:
    """Convert a stored configuration to a `Config`; errors name `what` it belongs to.

    Raises:
        ConfigError: it holds knobs or values that this program does not know.
    """
    try:
        return Config.model_validate(up_to_date(values))
    except ValidationError as error:
        lines = "\n".join(f"  {explain(detail)}" for detail in error.errors())
        raise ConfigError(
            f"this program cannot use the stored configuration of {what}:\n{lines}\n"
            "If a newer program wrote it, upgrade this one"
        ) from None


def unknown(values: Values) -> list[str]:
    """List the knobs of an up-to-date configuration that this program does not know, as `key=value`."""
    try:
        Config.model_validate(values)
    except ValidationError as error:
        details = [detail for detail in error.errors() if detail["type"] == "extra_forbidden"]
        return [f"{'.'.join(str(part) for part in detail['loc'])}={brief(detail['input'])}" for detail in details]
    return []


def _filled(model: type[BaseModel], values: Values) -> Values:
    """Return `values` of a section with the defaults of all missing knobs."""
    known = {}
    for name, field in model.model_fields.items():
        if name in values:
            known[name] = _filled_value(field.annotation, values[name])
        elif not field.is_required():
            known[name] = to_jsonable_python(field.get_default(call_default_factory=True))
    return values | known


def _filled_value(annotation: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if typing.get_origin(annotation) is dict:
        return {name: _filled_value(typing.get_args(annotation)[1], inner) for name, inner in value.items()}
    section = section_of(annotation, value)
    return _filled(section, value) if section else value


def _pop(values: Values, key: str) -> Any:
    """Remove and return the value at a dotted key; `_ABSENT` if there is none."""
    *path, name = key.split(".")
    section: Any = values
    for part in path:
        section = section.get(part) if isinstance(section, dict) else None
    return section.pop(name, _ABSENT) if isinstance(section, dict) else _ABSENT


def _get(values: Values, path: Sequence[str]) -> Any:
    """Return the value at a path of keys; `_ABSENT` if there is none."""
    section: Any = values
    for part in path:
        section = section.get(part, _ABSENT) if isinstance(section, dict) else _ABSENT
    return section


def _put(values: Values, key: str, value: Any) -> None:
    *path, name = key.split(".")
    for part in path:
        values = values.setdefault(part, {})
    values[name] = value


def _put_missing(values: Values, key: str, value: Any) -> None:
    """Set a knob that is absent, unless a section above it is no mapping."""
    *path, name = key.split(".")
    section: Any = values
    for part in path:
        section = section.setdefault(part, {}) if isinstance(section, dict) else None
    if isinstance(section, dict):
        section.setdefault(name, value)
