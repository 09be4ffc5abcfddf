"""The stages, one package per subject: Prefect tasks in `task.py`, plain Python everywhere else."""

from storage.early import end_without_traceback

end_without_traceback()
