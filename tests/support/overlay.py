"""Virtual environments on top of this project's one, with pinned packages that it does not need itself.

python -m tests.support.overlay FOLDER REQUIREMENTS    make one, unless it is up to date
"""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path


def overlay_python(folder: Path, requirements: Path) -> Path:
    """Return the interpreter of the environment in `folder`; make it unless it has these `requirements`.

    `venv --system-site-packages` shows the packages of the Python that an environment was made from, not those of
    another environment. So a .pth file names the folder of this project's packages.
    """
    python, done = folder / "bin/python", folder / requirements.name
    if is_made(folder, requirements):
        return python
    print(f"installing {requirements.name} into {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    packages = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    Path(packages, "below.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip = (sys.executable, "-m", "pip", "--python", str(python))
    _run(*pip, "install", "--quiet", "--no-deps", "--disable-pip-version-check", "-r", str(requirements))
    done.write_text(_content(requirements))
    return python


def is_made(folder: Path, requirements: Path) -> bool:
    """Return whether the environment in `folder` is there and has these `requirements`."""
    done = folder / requirements.name
    return done.exists() and done.read_text() == _content(requirements)


def _content(requirements: Path) -> str:
    return f"{requirements.read_text()}# below: {sysconfig.get_path('purelib')}\n"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed:\n{done.stderr[-3000:]}")


if __name__ == "__main__":
    overlay_python(*map(Path, sys.argv[1:]))
