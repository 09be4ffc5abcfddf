"""Which sections an annotation of the schema admits, and which of them some values are."""

import typing
from typing import Any

from pydantic import BaseModel


def sections(annotation: Any) -> list[type[BaseModel]]:
    """The sections that an annotation admits, through unions and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in typing.get_args(annotation) for model in sections(argument)]


def tags(model: type[BaseModel]) -> tuple[str, ...]:
    """Values of the discriminator `kind` of a problem source."""
    field = model.model_fields.get("kind")
    return typing.get_args(field.annotation) if field else ()


def section_of(annotation: Any, values: dict[str, Any]) -> type[BaseModel] | None:
    """The section that `values` are, of those that `annotation` admits; None where they are none."""
    admitted = sections(annotation)
    if len(admitted) > 1:
        admitted = [model for model in admitted if values.get("kind") in tags(model)]
    return admitted[0] if admitted else None
