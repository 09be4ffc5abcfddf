"""The process of a Prefect worker whose temporary files lie in a folder of its own.

Prefect's runner makes `runner_storage` in the folder for temporary files, where another user can be first to make
that name, and so keep a worker from starting. `TMPDIR` stays as it is: flow runs inherit it, and their sockets need
short paths.

    python -P flows/launch/prefect_worker.py FOLDER ARGUMENT-OF-PREFECT…
"""

import os
import runpy
import sys
import tempfile

if __name__ == "__main__":
    tempfile.tempdir = sys.argv.pop(1)
    sys.path.insert(0, os.getcwd())  # as `python -m prefect` has it: hooks of flows are imported here
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
