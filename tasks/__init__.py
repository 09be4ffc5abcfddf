"""The stages, one package per subject: Prefect tasks in `task.py`, plain Python everywhere else."""
