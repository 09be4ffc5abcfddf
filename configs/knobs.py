"""Types of knobs, the base class of the sections, and how to find the section of a value."""

import difflib
import typing
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from configs.safety import check_uri

Share = Annotated[float, Field(ge=0, le=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
URI = Annotated[str, AfterValidator(check_uri)]


def check_temperature(temperature: float) -> float:
    """Return `temperature` if vLLM samples with it.

    Raises:
        ValueError: it is not 0 or 0.01 to 2. Between 0 and 0.01 vLLM would use 0.01 and only log a warning.
    """
    if not (temperature == 0 or 0.01 <= temperature <= 2):  # also NaN
        raise ValueError(
            f"{temperature!r} is not a temperature that vLLM samples with: use 0 (greedy) or 0.01 to 2. vLLM would "
            "raise a smaller one to 0.01, and the recorded logprobs would not be those of the temperature in training"
        )
    return temperature


Temperature = Annotated[float, AfterValidator(check_temperature)]


Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
"""A seed of 64 bits, as torch needs it."""
Workers = Annotated[int, Field(gt=0, le=10_000)]
"""A number of processes or threads; no machine starts more."""


class Knobs(BaseModel):
    """The base class of all sections: frozen; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def refuse_idle(section: Knobs, *names: str, why: str) -> None:
    """Refuse knobs that differ from their default but have no effect; `why` ends the message.

    An empty knob is never refused: it asks for nothing.
    """
    for name in names:
        value = getattr(section, name)
        if value not in (None, type(section).model_fields[name].default):
            raise ValueError(f"{name}={value!r} has no effect {why}")


def sections(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that an annotation allows, also inside of unions and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in typing.get_args(annotation) for model in sections(argument)]


def tags(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the values by which a section of several forms is known: `kind` of a source, `type` of an algorithm."""
    field = model.model_fields.get("kind", model.model_fields.get("type"))
    return typing.get_args(field.annotation) if field and typing.get_origin(field.annotation) is Literal else ()


def section_of(annotation: Any, values: dict[str, Any]) -> type[BaseModel] | None:
    """Return the section of `annotation` to which `values` belong; None if they belong to none."""
    models = sections(annotation)
    if len(models) > 1:
        named = values.get("kind", values.get("type"))
        models = [model for model in models if named in tags(model)]
    return models[0] if models else None


def nearest(name: str, names: Iterable[str]) -> str:
    """Return `, did you mean …?` for a message; empty if no name is similar."""
    known = sorted(names, key=lambda each: (len(each), each))
    longer = [each for each in known if name and each.startswith(name)]  # `temp`, for `temperature`
    close = longer or difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f", did you mean {close[0]!r}?" if close else ""
