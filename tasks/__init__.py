"""The work of the stages, one package per subject: plain Python, whose Prefect tasks are in `flows/stages`."""

import storage  # noqa: F401 - Ctrl-C while the module is imported
