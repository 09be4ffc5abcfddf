"""TRL's environment: a virtual environment on top of this project's one, with the pinned packages that TRL adds."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def trl_python(folder: Path) -> Path:
    """Return the interpreter of TRL's environment; make the environment in `folder` unless it is up to date.

    `venv --system-site-packages` shows the packages of the Python that an environment was made from, not those of
    another environment. So a .pth file names the folder of this project's packages.
    """
    python, done = folder / "bin/python", folder / REQUIREMENTS.name
    wanted = f"{REQUIREMENTS.read_text()}# below: {sysconfig.get_path('purelib')}\n"
    if done.exists() and done.read_text() == wanted:
        return python
    print(f"installing TRL into {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    packages = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    Path(packages, "below.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip = (sys.executable, "-m", "pip", "--python", str(python))
    _run(*pip, "install", "--quiet", "--no-deps", "--disable-pip-version-check", "-r", str(REQUIREMENTS))
    done.write_text(wanted)
    return python


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed:\n{done.stderr[-3000:]}")
