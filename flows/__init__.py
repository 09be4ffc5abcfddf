"""Prefect flows: the pages to read first."""

from storage import interrupts

interrupts.while_importing(__name__)
