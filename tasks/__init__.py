"""The stages: Prefect task shells here, plain Python by subject in the packages below."""

from storage import interrupts

interrupts.while_importing(__name__)
