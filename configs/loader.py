"""Loads YAML with dotted overrides, or a stored configuration, into a validated `Config`.

Errors name the key, the value and the remedy.
"""

import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from configs.algorithms import NAMES
from configs.knobs import nearest, sections
from configs.policy import BEGINNINGS
from configs.problems import FORMS
from configs.safety import brief, check_depth, check_interpolations, open_regular
from configs.schema import Config
from configs.stored import former, up_to_date

FOLDER = Path(__file__).parent
_REFUSALS = (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError, RecursionError)
"""Errors that YAML and OmegaConf raise for unreadable input; OSError: a lone scalar; ValueError: too many digits."""


class ConfigError(ValueError):
    """The configuration cannot be used; the message names key, value and remedy."""


def available() -> list[str]:
    """List the names of the configurations in this package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Load the configuration `name` (one of `available()`, or the path of a YAML file) with dotted overrides.

    An override with a mapping as its value replaces the section: `policy={path: my-model}`. `policy.path=my-model`
    takes the place of `policy.fork`, and leaves `policy.lora` as it is. `algorithm.type=grpo`
    replaces the section of another algorithm, whose knobs mean nothing to it.

    >>> load("demo", ["agent.args.num_turns=3"]).agent.args["num_turns"]
    3

    Raises:
        ConfigError: a file, a key or a value is unknown, or values contradict each other.
    """
    merged = _read(name)
    for override in overrides:
        _apply(override, merged)
    try:
        check_interpolations(OmegaConf.to_container(merged, resolve=False))
        values = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except _REFUSALS as error:
        raise ConfigError(f"configuration {name} cannot be resolved: {error}") from None
    config = _validated(values, f"configuration {name}:")
    if config.algorithm.kl.in_loss and config.algorithm.kl.estimator == "k1":  # in stored ones it may still be
        remedy = "algorithm.kl.estimator=k1 has no gradient with place=loss: use k2 or k3"
        raise ConfigError(f"configuration {name}: {remedy}, in a run that has begun by policy.fork=RUN@N run.name=…")
    return config


def read_stored(values: dict[str, Any], what: str) -> Config:
    """Convert a stored configuration to a `Config` with this program's behaviour; errors name `what` it belongs to.

    Raises:
        ConfigError: it holds knobs or values that this program does not know.
    """
    head = f"this program cannot use the stored configuration of {what}:"
    return _validated(up_to_date(values), head, "\nIf a newer program wrote it, upgrade this one")


def _validated(values: Any, head: str, end: str = "") -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines = "".join(f"\n  {explain(detail)}" for detail in error.errors())
        raise ConfigError(head + lines + end) from None


def to_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML that is accepted again."""
    # OmegaConf quotes strings that its own loader reads as numbers, such as "1e5".
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(config.model_dump(mode="json"))))


def _escaped(value: Any) -> Any:
    """Escape `${`, which begins an interpolation, in all strings of `value`."""
    if isinstance(value, dict):
        return {key: _escaped(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """List the keys whose values differ between two resolved configurations, as `key: old -> new`."""
    return [f"{key}: {before!r} -> {after!r}" for key, before, after in changed(old, new)]


def changed(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """List the keys whose values differ between nested dictionaries, with both values; an absent one counts as None."""
    left, right = dict(flatten(old)), dict(flatten(new))
    found = [(key, left.get(key), right.get(key)) for key in sorted(left.keys() | right.keys())]
    return [each for each in found if each[1] != each[2]]


def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and values of nested dictionaries."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read(name: str | Path) -> DictConfig:
    path = FOLDER / f"{name}.yaml" if str(name) in available() else Path(name)
    try:
        with open_regular(path) as file:
            text = file.read().decode()
    except FileNotFoundError:
        known = f"{nearest(str(name), available())}; use one of {', '.join(available())}"
        raise ConfigError(f"no configuration {name!r}{known}, or give a YAML file") from None
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a null character in the name
        raise ConfigError(f"configuration {path} cannot be read: {error}") from None
    try:
        check_depth(text)
        loaded = OmegaConf.load(io.StringIO(text))
    except _REFUSALS as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path} must hold a mapping of sections, not a list")
    return loaded


def _apply(override: str, config: DictConfig) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {brief(override)} is not key=value, such as run.iterations=2")
    try:
        check_depth(text)
        check_interpolations({key: text})
        value = OmegaConf.select(OmegaConf.from_dotlist([override]), key, throw_on_missing=True)
        if key == "algorithm.type" and value != OmegaConf.select(config, key, default="ppo"):
            key, value = "algorithm", {"type": value}
        OmegaConf.update(config, key, value, merge=False, force_add=True)
        if value is not None and key in (begins := [f"policy.{name}" for name in BEGINNINGS]):
            for other in set(begins) - {key}:
                OmegaConf.update(config, other, None, force_add=True)
    except _REFUSALS as error:
        raise ConfigError(f"override {brief(override)} cannot be applied: {error}") from None


def explain(detail: ErrorDetails) -> str:
    """Describe a pydantic error on one line: the dotted key, its value, what is wrong, and the nearest known name."""
    location = [*detail["loc"]]
    if location[:2] == ["problems", "train"] and location[2:3] in [[form] for form in FORMS]:
        del location[2]  # pydantic names the form of `problems.train`, and that of a section, such as `grpo`
    key = ".".join(str(part) for place, part in enumerate(location) if place != 1 or part not in (*NAMES, "own"))
    if detail["type"] == "extra_forbidden":
        if became := former(key):
            return f"{key}={brief(detail['input'])}: it is no knob any more: {became}"
        name, known = str(location[-1]), "`python -m configs` shows those that there are"
        if location[:2] == ["algorithm", "own"]:
            known = f"arguments of your class are algorithm.args={{{name}: …}}"
        return f"{key}={brief(detail['input'])}: unknown key{nearest(name, _names(Config))}; {known}"
    if detail["type"] == "missing":
        return f"{key}: must be given"
    if detail["type"] == "value_error":
        return f"{key + ': ' if key else ''}{detail['ctx']['error']}"
    return f"{key}={brief(detail['input'])}: {detail['msg']}"


def _names(section: type[BaseModel]) -> set[str]:
    """Return the names of all knobs in a section and in those inside."""
    inside = [one for field in section.model_fields.values() for one in sections(field.annotation)]
    return set(section.model_fields).union(*map(_names, inside))
