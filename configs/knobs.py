"""What the sections of the configuration are made of."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0, le=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


class Knobs(BaseModel):
    """Base of all sections: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def refuse_idle(section: Knobs, *names: str, why: str) -> None:
    """Refuses knobs that were changed but do nothing."""
    for name in names:
        value = getattr(section, name)
        if value != type(section).model_fields[name].default:
            raise ValueError(f"{name}={value!r} has no effect {why}")
