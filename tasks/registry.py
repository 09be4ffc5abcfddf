"""What a configuration names: registered classes, or one's own classes or functions as `package.module:name`."""

import inspect
import traceback
import typing
from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from configs.knobs import nearest
from storage.visible import described
from tasks.own_code import import_own

T = TypeVar("T")


_TESTS: dict[str, Callable[[object], bool]] = {"Class": inspect.isclass, "function": inspect.isfunction}


class Registry(Generic[T]):
    """The classes of one kind by name. The error messages contain `kind` ("agent", "environment").

    `own` says what a user's `package.module:name` names. A function has no instances: `make` is for classes. `key` is
    the knob that names one.
    """

    def __init__(self, kind: str, own: Literal["Class", "function"] = "Class", key: str | None = None) -> None:
        self.kind, self._own, self._key = kind, own, key or f"{kind}.type"
        self._classes: dict[str, type[T] | str] = {}

    def register(self, name: str, cls: type[T] | str) -> None:
        """Register a class, or `package.module:Class`, which is imported when it is used."""
        if ":" in name or name in self._classes:
            raise ValueError(f"{self.kind} name {name!r} is taken or contains a colon: choose another")
        self._classes[name] = cls

    @property
    def names(self) -> list[str]:
        return sorted(self._classes)

    def find(self, name: str) -> type[T]:
        """Return the class registered as `name`; import it, or one's own function, if `name` has a colon.

        Raises:
            ValueError: unknown name, module, class or function.
        """
        if ":" in name:
            return self._import(name)
        if name not in self._classes:
            raise ValueError(
                f"{self._key}={name!r} is not registered{nearest(name, self._classes)}; "
                f"choose one of {', '.join(sorted(self._classes))}, or give package.module:{self._own}"
            )
        found = self._classes[name]
        return self._import(found) if isinstance(found, str) else found

    def make(self, name: str, context: object, arguments: Mapping[str, Any]) -> T:
        """Return a new instance of `name`.

        Raises:
            ValueError: unknown name, or its constructor raised an exception or tried to end the process.
        """
        constructor: Any = self.find(name)
        try:
            return typing.cast(T, constructor(context, **arguments))
        except (Exception, SystemExit) as error:
            raise ValueError(f"{self._key}={name!r}: its constructor raised {described_with_place(error)}") from error

    def _import(self, name: str) -> type[T]:
        module_name, _, class_name = name.partition(":")
        try:
            module = import_own(name)
        except ModuleNotFoundError as error:
            raise ValueError(f"{self._key}={name!r}: no module {error.name!r}; is its folder on PYTHONPATH?") from error
        found = self._accept(getattr(module, class_name, None))
        if found is None:
            there = [key for key, value in vars(module).items() if self._accept(value)]
            raise ValueError(
                f"{self._key}={name!r}: {module_name} has no {self._own.lower()} {class_name!r}"
                f"{nearest(class_name, there)}"
            )
        return found

    def _accept(self, found: object) -> type[T] | None:
        """Return what a module has under a name if a user may name it; None otherwise."""
        return typing.cast(type[T], found) if _TESTS[self._own](found) else None

    def check_arguments(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Check a user's arguments for the constructor of `name`: their names, their types, and that none is missing.

        The pipeline passes the first parameter (the context); the configuration gives all others.

        Raises:
            ValueError: an argument is unknown, missing or of another type.
        """
        cls, where = self.find(name), f"{self.kind}.args"
        parameters = dict(list(inspect.signature(cls).parameters.items())[1:])
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        hints = typing.get_type_hints(cls.__init__ if inspect.isclass(cls) else cls, include_extras=True)
        for key, value in arguments.items():
            if key not in parameters and not takes_any:
                raise ValueError(
                    f"{where}.{key}={value!r}: {name} takes no such argument{nearest(key, parameters)}; "
                    f"it takes {', '.join(parameters) or 'none'}"
                )
            _check_type(f"{where}.{key}", value, hints.get(key, Any))
        try:
            inspect.Signature(list(parameters.values())).bind(**arguments)
        except TypeError as error:
            raise ValueError(f"{where}: {name}: {error}") from None


def described_with_place(error: BaseException) -> str:
    """Return the text of an error in a user's code, with the line that raised it."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{described(error)}{place}"


def _check_type(key: str, value: Any, annotation: Any) -> None:
    try:
        converted = TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{key}={value!r}: {error.errors()[0]['msg']}") from None
    if isinstance(value, str) and isinstance(converted, int | float):  # the constructor would get the text
        raise ValueError(f"{key}={value!r}: is a text; without quotes it is {converted!r}")
