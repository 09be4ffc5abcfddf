"""Fingerprints of a user's own code: agents, environments, tools, scorers and algorithms that a configuration names.

A name is `module:Name` anywhere in the sections `agent`, `environment`, `score` and `algorithm`, or the file of a
command agent (`agent.args.argv=[python, /path/agent.py]`). The fingerprint covers the module's file, the packages
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
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from configs import Config
from configs.safety import walk
from storage.errors import first_few

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
