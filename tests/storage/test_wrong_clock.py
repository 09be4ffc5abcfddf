"""S3 refuses what a host with a wrong clock signs; the message says that it is the clock."""

import os
import subprocess
import sys

import pytest

from tests.support.wrong_clock import need_library, wrong_clock

READ = "import sys; from storage.objects.store import Store; Store(sys.argv[1]).read('runs/x')"


@need_library
@pytest.mark.parametrize(("seconds", "said"), [(3600, "60 minutes ahead of"), (-3600, "60 minutes behind")])
def test_the_clock_is_named(bucket: str, seconds: int, said: str) -> None:
    command = [sys.executable, "-c", READ, f"s3://{bucket}/x"]
    done = subprocess.run(command, env=os.environ | wrong_clock(seconds), capture_output=True, text=True, check=False)
    assert f"The clock of this host is {said} the server's" in done.stderr
