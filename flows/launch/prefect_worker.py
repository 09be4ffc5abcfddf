"""The process of a Prefect worker with its own folder for temporary files.

Prefect's runner creates `runner_storage` in the folder for temporary files. In a shared folder, another user can create
this name first, and then the worker does not start. `TMPDIR` stays unchanged: flow runs inherit it, and their sockets
need short paths.

    python -P flows/launch/prefect_worker.py FOLDER ARGUMENT-OF-PREFECT…
"""

import os
import runpy
import sys
import tempfile

if __name__ == "__main__":
    tempfile.tempdir = sys.argv.pop(1)
    sys.path.insert(0, os.getcwd())  # as in `python -m prefect`: the worker imports hooks of flows
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
