"""The Prefect tasks, one module per stage. What they call is plain Python in the package of `tasks/` with that name."""
