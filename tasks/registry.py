"""What a configuration names: registered classes, or one's own classes or functions as `package.module:name`.

**Fingerprints** cover a user's own code: agents, environments, tools, scorers and algorithms that a configuration
names as `module:Name` anywhere in the sections `agent`, `environment`, `score` and `algorithm`, or the file of a
command agent (`agent.args.argv=[python, /path/agent.py]`). A fingerprint covers the module's file, the packages
around it, and all modules that these import in turn, wherever in their text, if they are the user's too: found on
Python's path, but neither in Python's library nor among installed packages. Of a package that is installed, the modules
of this package are covered. This program has its own fingerprint, `code_version`.

Not covered is what no import statement names: modules that are imported by a computed name, commands after `-m`, data
files, compiled modules, and what installed packages do.

A file is read once in a process, when its fingerprint is first asked for, because Python imports it once, too. What
imports it later, or in another process or on another host, refuses other code (`refuse_changed`, `refuse_other`). Only
a module that an import statement inside of a function brings in later is not looked at again.
"""

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
import sysconfig
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from configs import Config
from configs.knobs import nearest
from configs.safety import walk
from storage.errors import first_few
from storage.visible import described

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
            known = f"{nearest(name, self._classes)}; choose one of {', '.join(self.names)}"
            raise ValueError(f"{self._key}={name!r} is not registered{known}, or give package.module:{self._own}")
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
            hint = nearest(class_name, there)
            raise ValueError(f"{self._key}={name!r}: {module_name} has no {self._own.lower()} {class_name!r}{hint}")
        return found

    def _accept(self, found: object) -> type[T] | None:
        """Return what a module has under a name if a user may name it; None otherwise."""
        return typing.cast(type[T], found) if _TESTS[self._own](found) else None

    def check_arguments(self, name: str, arguments: Mapping[str, Any], where: str = "") -> None:
        """Check a user's arguments for the constructor of `name`: their names, their types, and that none is missing.

        The pipeline passes the first parameter (the context); the configuration gives all others. `where` is the knob
        that has them, in messages.

        Raises:
            ValueError: an argument is unknown, missing or of another type.
        """
        cls, where = self.find(name), where or f"{self.kind}.args"
        parameters = dict(list(inspect.signature(cls).parameters.items())[1:])
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        hints = typing.get_type_hints(cls.__init__ if inspect.isclass(cls) else cls, include_extras=True)
        for key, value in arguments.items():
            if key not in parameters and not takes_any:
                known = f"{nearest(key, parameters)}; it takes {', '.join(parameters) or 'none'}"
                raise ValueError(f"{where}.{key}={value!r}: {name} takes no such argument{known}")
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


Code = dict[str, str]
"""The sha256 of each file, by its path in the folder where Python finds it; a command's file by its whole path.

Example: {"my_agents.py": "9f3a…", "my_games/__init__.py": "e3b0…", "my_games/maze.py": "77c2…"}
"""

PLAYS = ("agent", "environment")
"""The sections that decide what is played."""
_NAME = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*):[A-Za-z_][\w.-]*")
_OURS = Path(__file__).parents[1]
_OUR_PACKAGES = ("configs", "flows", "storage", "tasks")
_LIBRARY = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}


def own_code(config: Config, sections: Sequence[str] = (*PLAYS, "score", "algorithm")) -> Code:
    """Return the fingerprints of the user's code that sections of a configuration name; empty if they name none."""
    sections_of = {section: getattr(config, section).model_dump(mode="json") for section in sections}
    members = [member.model_dump(mode="json", include=set(sections)) for member in config.problems.members]
    texts = [text for _, text in walk([sections_of, *members]) if isinstance(text, str)]
    return dict(sorted(item for text in texts for item in files_of(text).items()))


def fingerprint(name: str) -> str:
    """Return one digest for the code of `module:Name`; for a module that imports none of the user's, its file's."""
    code = files_of(name)
    if len(code) == 1:
        return next(iter(code.values()))
    return hashlib.sha256(json.dumps(code, sort_keys=True).encode()).hexdigest()


def files_of(text: str) -> Code:
    """Return the fingerprints of what a text of a configuration names; nothing if it names no code of the user's."""
    return {name: digest for name, _, digest in _read(text)}


@functools.cache
def import_own(name: str) -> ModuleType:
    """Return the module of `module:Name`, imported as its fingerprint says.

    Raises:
        CodeChangedError: it has changed since its fingerprint was read.
        Exception: what the module raises.
    """
    files_of(name)
    module = importlib.import_module(name.partition(":")[0])
    refuse_changed(name)
    return module


def refuse_changed(text: str) -> None:
    """Refuse code that a text names, and that is just imported or started, if it is no longer that of `files_of`.

    Raises:
        CodeChangedError: it is not.
    """
    now = {name: _digest_at(path, path.stat().st_ctime_ns) for name, path, _ in _read(text) if path.is_file()}
    refuse_other(now, files_of(text))


def refuse_other(found: Code, expected: Code) -> None:
    """Refuse code with other fingerprints than expected.

    Raises:
        CodeChangedError: a file differs, is missing or is new.
    """
    if other := sorted(name for name, _ in found.items() ^ expected.items()):
        raise CodeChangedError(
            f"{first_few(sorted({*other}))} changed since this run has read it, or differs on {os.uname().nodename}: "
            "its fingerprint is of other code. Start the command again, with the same code on all hosts"
        )


class CodeChangedError(ValueError):
    """The user's code is not that of the fingerprints."""


@functools.cache
def _read(text: str) -> tuple[tuple[str, Path, str], ...]:
    """Return name, path and sha256 of each file, read once."""
    if match := _NAME.fullmatch(text):
        covered = _covered(match[1], _root(match[1]))
        return tuple((path.relative_to(found).as_posix(), path, digest) for found, path, digest in covered)
    if text.endswith(".py") and os.path.isfile(text):  # unlike Path.is_file, no error for what cannot be a path
        script = Path(text).resolve()
        return tuple((str(path), path, digest) for _, path, digest in _covered(script.stem, script.parent))
    return ()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@functools.cache  # a command's files are asked for after each episode, and may be thousands
def _digest_at(path: Path, _changed_ns: int) -> str:
    return _digest(path.read_bytes())


def _root(module: str) -> Path | None:
    """Return the folder where Python finds the module, or the package that it is in; import nothing."""
    top = module.partition(".")[0]
    spec = None if top in sys.stdlib_module_names or top == "__main__" else importlib.util.find_spec(top)
    if spec is None:
        return None
    folders = spec.submodule_search_locations
    return Path(next(iter(folders)) if folders else spec.origin or "").parent


def _is_library(folder: Path) -> bool:
    """Return whether a folder has installed packages, also those that a package has in it and puts on the path."""
    installed = not {"site-packages", "dist-packages"}.isdisjoint(folder.parts)
    return installed or folder in _LIBRARY or folder.parent in _LIBRARY


def _covered(module: str, root: Path | None) -> Iterator[tuple[Path, Path, str]]:
    """Yield, of a module in the folder `root` and of all that it imports, folder, path and sha256 of each file."""
    if root is None:
        return
    roots = [root, *(folder for folder in map(Path, sys.path) if not _is_library(folder) and not _is_library(root))]
    top = module.partition(".")[0] if _is_library(root) else ""
    pending, seen = [module], set[str]()
    while pending:
        name = pending.pop()
        package = name.partition(".")[0]
        if name in seen or (top and package != top) or (package in _OUR_PACKAGES and _OURS in roots):
            continue
        seen.add(name)
        pending += [name.rpartition(".")[0]] if "." in name else []
        places = [(folder, folder.joinpath(*name.split("."))) for folder in roots]
        files = [(folder, path) for folder, at in places for path in (at / "__init__.py", Path(f"{at}.py"))]
        if found := next((file for file in files if file[1].is_file()), None):
            folder, path = found
            data = path.read_bytes()
            yield folder, path, _digest(data)
            pending += _imports(data, name if path.name == "__init__.py" else name.rpartition(".")[0])


def _imports(source: bytes, package: str) -> Iterator[str]:
    """Yield what a file in a package imports, at any place in it; each name may be a module, or something in one."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):  # a command's file for another Python
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with contextlib.suppress(ImportError):  # above its top-level package
                module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                yield from (module, *(f"{module}.{alias.name}" for alias in node.names))
