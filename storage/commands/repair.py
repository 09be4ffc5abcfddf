"""`repair`: replaces lost entries of the logs."""

import argparse

from storage.commands.output import Output, print_progress
from storage.maintenance.repair import repair
from storage.objects.store import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare no arguments."""


def run(store: Store, _: argparse.Namespace) -> Output:
    """Repair the logs and show what was done. `verify` reports other problems."""
    filled, entered = repair(store, print_progress)
    summary = f"{len(filled)} lost entries filled, {len(entered)} versions and aliases entered into the catalog"
    return Output({"filled": filled, "entered": entered}, [summary])
