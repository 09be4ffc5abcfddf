"""S3 refuses what a host with a wrong clock signs; the message says that it is the clock."""

import subprocess
import sys

import pytest

from tests.support.paths import ROOT

READ = """
import sys
from storage.objects.store import Store
from tests.support.wrong_clock import set_clock_ahead
set_clock_ahead(float(sys.argv[2]))
Store(sys.argv[1]).read("runs/x")
"""


@pytest.mark.parametrize(("seconds", "said"), [(3600, "60 minutes ahead of"), (-3600, "60 minutes behind")])
def test_the_clock_is_named(bucket: str, seconds: int, said: str) -> None:
    command = [sys.executable, "-c", READ, f"s3://{bucket}/x", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert f"The clock of this host is {said} the server's" in done.stderr
