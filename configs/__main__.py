"""Print all knobs on one page: the name, type, default and sentence of each."""

import argparse
import inspect
import json
import signal
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from configs.knobs import sections, tags
from configs.schema import Config


def entries(section: type[BaseModel], prefix: str = "", seen: set[Any] | None = None) -> Iterator[tuple[str, str]]:
    """Yield title and sentence of each knob and section in a section, and of those inside.

    A section that several others have, such as a source of problems, is shown in the first one; one of the whole
    configuration, such as `agent`, only there.

    Example: ("algorithm.eps_clip: float = 0.2", "The ratio is clipped to …")
    """
    if seen is None:
        seen = {one for field in section.model_fields.values() for one in sections(field.annotation)}
    type_first = sorted(section.model_fields.items(), key=lambda named: not (named[0] == "type" and tags(section)))
    for name, field in type_first:
        inside = sections(field.annotation)
        default = "" if field.is_required() or inside else f" = {json.dumps(to_jsonable_python(field.default))}"
        of_form = inspect.getdoc(section) if name == "type" and tags(section) else None
        sentence = field.description or of_form or "; ".join(inspect.getdoc(one) or "" for one in inside)
        yield f"{prefix}{name}: {_type(field.annotation)}{default}", sentence
        for one in inside:
            if one not in seen or not prefix:
                seen.add(one)
                yield from entries(one, f"{prefix}{name}.", seen)


def _type(annotation: Any) -> str:
    """Write a type as a user reads it: `reward | loss`, `float | empty`, `list[ToolChoice]`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin is typing.Literal:
        return " | ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " | ".join("empty" if argument is types.NoneType else _type(argument) for argument in arguments)
    name: str = getattr(origin or annotation, "__name__", str(annotation))
    return f"{name}[{', '.join(_type(argument) for argument in arguments)}]" if arguments else name


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m configs", description=__doc__)
    parser.add_argument("beginning", nargs="?", default="", help="show only names that begin so, such as algorithm.kl")
    name = parser.parse_args().beginning
    if not (chosen := [each for each in entries(Config) if each[0].startswith(name)]):
        parser.error(f"no knob's name begins with {name!r}")
    for title, sentence in chosen:
        print(title)
        print(textwrap.indent(textwrap.fill(sentence, 110), "    ") + "\n")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `… | head` is not an error
    main()
