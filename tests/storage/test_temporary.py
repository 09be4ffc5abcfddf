"""Temporary folders of a killed process are removed by the next one; those of a living process are not."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from storage.objects import temporary
from storage.objects.temporary import TemporaryFolder

MAKE = """
from storage.objects.temporary import TemporaryFolder
kept = TemporaryFolder()
(kept.path / "file").write_text("x")
print(kept.path, flush=True)
input()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    temporary._remove_abandoned.cache_clear()
    return tmp_path


def test_a_folder_outlives_its_process_only_until_the_next_one(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", MAKE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout
        made = Path(other.stdout.readline().strip())
        first = TemporaryFolder()
        assert sorted(folder.iterdir()) == sorted([made, first.path])
        other.kill()
        other.wait()
        assert made.exists()
        temporary._remove_abandoned.cache_clear()  # as in a new process
        second = TemporaryFolder()
    assert sorted(folder.iterdir()) == sorted([first.path, second.path])
    first.remove()
    second.remove()
    assert list(folder.iterdir()) == []
