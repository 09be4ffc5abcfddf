"""Things named in a configuration: looked up by name, or imported as `package.module:Class`."""

import difflib
import importlib
import inspect
import traceback
import typing
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from storage.visible import described

T = TypeVar("T")


class Registry(Generic[T]):
    """Classes by name. `kind` ("agent", "environment") appears in the messages."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._classes: dict[str, type[T]] = {}

    def register(self, name: str, cls: type[T]) -> None:
        if ":" in name or name in self._classes:
            raise ValueError(f"{self.kind} name {name!r} is taken or holds a colon: choose another")
        self._classes[name] = cls

    def find(self, name: str) -> type[T]:
        """The class registered as `name`, or imported where `name` is `package.module:Class`.

        Raises:
            ValueError: unknown name, module or class.
        """
        if ":" in name:
            return self._import(name)
        if name not in self._classes:
            raise ValueError(
                f"{self.kind}.type={name!r} is not registered{nearest(name, self._classes)}; "
                f"there are {', '.join(sorted(self._classes))}, or give package.module:Class"
            )
        return self._classes[name]

    def make(self, name: str, context: object, arguments: Mapping[str, Any]) -> T:
        """An instance of `name`.

        Raises:
            ValueError: unknown name, or its constructor raised something, or tried to end the process.
        """
        constructor: Any = self.find(name)
        try:
            return typing.cast(T, constructor(context, **arguments))
        except (Exception, SystemExit) as error:
            raise ValueError(f"{self.kind}.type={name!r}: its constructor raised {_told(error)}") from error

    def _import(self, name: str) -> type[T]:
        module_name, _, class_name = name.partition(":")
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"{self.kind}.type={name!r}: no module {error.name!r}; is its folder on PYTHONPATH?"
            ) from error
        except (Exception, SystemExit) as error:  # whatever a user's module does; Ctrl-C stays one
            raise ValueError(f"{self.kind}.type={name!r}: importing {module_name!r} raised {_told(error)}") from error
        found = getattr(module, class_name, None)
        if not inspect.isclass(found):
            classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
            raise ValueError(
                f"{self.kind}.type={name!r}: {module_name} has no class {class_name!r}{nearest(class_name, classes)}"
            )
        return typing.cast(type[T], found)

    def check_arguments(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Refuse arguments that the constructor of `name` does not take, lacks, or takes in another type.

        The first parameter is the context that the pipeline passes; the rest is the user's.
        """
        parameters, hints = self._inspect(name)
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        where = f"{self.kind}.args"
        for key, value in arguments.items():
            if key not in parameters and not takes_any:
                raise ValueError(
                    f"{where}.{key}={value!r}: {name} takes no such argument{nearest(key, parameters)}; "
                    f"it takes {', '.join(parameters) or 'none'}"
                )
            _check_type(f"{where}.{key}", value, hints.get(key, Any))
        missing = [
            key
            for key, parameter in parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            and key not in arguments
        ]
        if missing:
            raise ValueError(f"{where}: {name} needs {', '.join(missing)}")

    def _inspect(self, name: str) -> tuple[dict[str, inspect.Parameter], dict[str, Any]]:
        """Parameters of the constructor of `name` but for the context, and their annotations."""
        cls = self.find(name)
        try:
            parameters = list(inspect.signature(cls).parameters.items())
            return dict(parameters[1:]), typing.get_type_hints(cls.__init__, include_extras=True)
        except Exception as error:  # annotations are evaluated, and may be any expression
            raise ValueError(
                f"{self.kind}.type={name!r}: the arguments of its constructor cannot be read: {_told(error)}"
            ) from error


def _told(error: BaseException) -> str:
    """An error of somebody's own code, and the line of it that raised it."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{described(error)}{place}"


def _check_type(key: str, value: Any, annotation: Any) -> None:
    try:
        meant = TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{key}={value!r}: {error.errors()[0]['msg']}") from None
    except PydanticUserError as error:
        raise ValueError(f"{key}: its annotation {annotation!r} is no type of a value in a configuration") from error
    if isinstance(value, str) and isinstance(meant, int | float):  # the constructor would be given the text
        raise ValueError(f"{key}={value!r}: is a text; without quotes it is {meant!r}")


def nearest(name: str, names: typing.Iterable[str]) -> str:
    """`, did you mean …?` for a message, or nothing."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""
