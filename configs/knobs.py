"""What the sections of the configuration are made of."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0, le=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


def check_temperature(temperature: float) -> float:
    """Returns it where vLLM samples with it.

    Raises:
        ValueError: it does not; between 0 and 0.01 it would take 0.01 and only log a warning.
    """
    if not (temperature == 0 or 0.01 <= temperature <= 2):  # also NaN
        raise ValueError(
            f"{temperature!r} is no temperature that vLLM samples with: use 0 (greedy) or 0.01 to 2. It would raise a "
            "smaller one to 0.01, and the recorded logprobs would not be those of the temperature trained with"
        )
    return temperature


Temperature = Annotated[float, AfterValidator(check_temperature)]


class Knobs(BaseModel):
    """Base of all sections: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def refuse_idle(section: Knobs, *names: str, why: str) -> None:
    """Refuses knobs that were changed but do nothing."""
    for name in names:
        value = getattr(section, name)
        if value != type(section).model_fields[name].default:
            raise ValueError(f"{name}={value!r} has no effect {why}")
