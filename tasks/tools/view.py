"""What a sandbox sees of this machine: an interpreter with its standard library, and the system's shared libraries."""

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

PACKAGES = ("numpy", "scipy", "sympy", "mpmath")
"""Packages for mathematics; a sandbox that is asked for packages sees those that are installed here."""
_ROOT = Path(__file__).parents[2]
_STANDARD_LIBRARY = Path(os.__file__).resolve().parent


def interpreter() -> str:
    """Return the path of the interpreter that a virtual environment's one stands for."""
    return os.path.realpath(Path(sys.base_prefix, "bin", f"python{sysconfig.get_config_var('LDVERSION')}"))


def prlimit() -> str:
    return os.path.realpath(shutil.which("prlimit") or "prlimit")


@cache
def links() -> dict[str, str]:
    """Return the links in the root that lead to shared libraries and programs, with their targets."""
    return {path: os.readlink(path) for path in ("/bin", "/lib", "/lib64") if os.path.islink(path)}


@cache
def visible() -> tuple[str, ...]:
    """Return the files and folders that every sandbox sees, read-only."""
    architecture = sysconfig.get_config_var("MULTIARCH")
    system = ("/lib64", "/usr/lib64", f"/lib/{architecture}", f"/usr/lib/{architecture}", "/etc/ld.so.cache")
    library = _STANDARD_LIBRARY
    if library.parent != Path("/usr/lib"):
        library = library.parent  # has shared libraries of this interpreter
    paths = [Path(path).resolve() for path in (*system, library, interpreter(), prlimit())]
    return tuple(dict.fromkeys(str(path) for path in paths if path.exists()))


@cache
def package_folders() -> tuple[str, ...]:
    """Return the folders of the installed packages for mathematics, with those of their shared libraries."""
    origins = [spec.origin for name in PACKAGES if (spec := importlib.util.find_spec(name)) and spec.origin]
    folders = [Path(origin).resolve().parent for origin in origins]
    candidates = [*folders, *(folder.with_name(f"{folder.name}.libs") for folder in folders)]
    return tuple(str(folder) for folder in candidates if folder.is_dir())


def hidden(shown: Iterable[str], secret: Sequence[Path] | None = None) -> list[str]:
    """Return those of the `secret` folders that lie in `shown` ones, so that an empty folder must cover them.

    By default these are installed packages, the home, the working directory and this project.
    """
    if secret is None:
        packages = [_STANDARD_LIBRARY / "site-packages", _STANDARD_LIBRARY / "dist-packages"]
        secret = [*packages, Path.home(), Path.cwd(), _ROOT]
    folders = dict.fromkeys(path.resolve() for path in secret if path.is_dir())
    return [str(folder) for folder in folders if any(folder.is_relative_to(path) for path in shown)]
