"""The stages, one package per subject: Prefect tasks in `task.py` and `*_task.py`, plain Python everywhere else."""

from storage import interrupts

interrupts.while_importing(__name__)
