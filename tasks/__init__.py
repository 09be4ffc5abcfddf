"""The work of the stages, one package per subject: plain Python, whose Prefect tasks are in `flows/stages`."""

from storage.early import end_without_traceback

end_without_traceback()
