"""Finds the sections that an annotation of the schema allows, and the one to which values belong."""

import typing
from typing import Any

from pydantic import BaseModel


def sections(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that an annotation allows, also inside of unions and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in typing.get_args(annotation) for model in sections(argument)]


def tags(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the values of the discriminator `kind` of a problem source."""
    field = model.model_fields.get("kind")
    return typing.get_args(field.annotation) if field else ()


def section_of(annotation: Any, values: dict[str, Any]) -> type[BaseModel] | None:
    """Return the section of `annotation` to which `values` belong; None if they belong to none."""
    models = sections(annotation)
    if len(models) > 1:
        models = [model for model in models if values.get("kind") in tags(model)]
    return models[0] if models else None
