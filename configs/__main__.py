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

from configs.knobs import sections
from configs.schema import Config

Entry = tuple[str, str, bool]
"""Title and sentence of a knob or a section, and whether it is a knob.

Example: ("ppo.eps_clip: float = 0.2", "The ratio is clipped to …", True)
"""


def entries(section: type[BaseModel], prefix: str = "", seen: set[Any] | None = None) -> Iterator[Entry]:
    """Yield an entry for each field of a section and of the sections inside.

    The knobs of a section that several others have, such as those of a source of problems, are shown in the first one.
    A `kind` chooses a section and is no knob; a knob that several sections inherit is one.
    """
    seen = set() if seen is None else seen
    for name, field in section.model_fields.items():
        inside = sections(field.annotation)
        default = "" if field.is_required() or inside else f" = {json.dumps(to_jsonable_python(field.default))}"
        sentence = field.description or "; ".join(inspect.getdoc(one) or "" for one in inside)
        declared = next(base for base in reversed(section.__mro__) if name in getattr(base, "model_fields", ())), name
        is_knob = not inside and name != "kind" and declared not in seen
        seen.add(declared)
        yield f"{prefix}{name}: {_type(field.annotation)}{default}", sentence, is_knob
        for one in inside:
            if one not in seen:
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
    parser.add_argument("beginning", nargs="?", default="", help="show only names that begin so, such as ppo.kl")
    beginning = parser.parse_args().beginning
    shown = [entry for entry in entries(Config) if entry[0].startswith(beginning)]
    for title, sentence, _ in shown:
        print(title)
        print(textwrap.indent(textwrap.fill(sentence, 110), "    ") + "\n")
    print(f"{sum(is_knob for *_, is_knob in shown)} knobs")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `… | head` is not an error
    main()
