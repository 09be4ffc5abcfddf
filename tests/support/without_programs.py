"""Run a command as on a machine that has only what the README names: `python -m tests.support.without_programs make …`.

Its PATH is one folder with links to every program of the present PATH, but for those that tests may lack. It gets no
`CI`, with which a test fails that lacks its program.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

LACKED = ("bwrap", "chromium", "google-chrome", "prometheus", "promtool", "radosgw", "ceph-mon", "ceph-osd")


def link_others(folder: Path) -> None:
    """Fill the folder with links to the programs that a shell would find by name."""
    for place in map(Path, os.environ["PATH"].split(os.pathsep)):
        for program in place.iterdir() if place.is_dir() else ():
            link = folder / program.name
            if program.name not in LACKED and not link.is_symlink():
                link.symlink_to(program)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="programs-") as folder:
        link_others(Path(folder))
        environment = {name: value for name, value in os.environ.items() if name not in ("CI", "S3_TEST_ENDPOINT")}
        return subprocess.run(sys.argv[1:], env=environment | {"PATH": folder}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
