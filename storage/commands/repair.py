"""`mend`: the logs made whole again."""

import argparse

from storage.commands.output import Output, print_progress
from storage.objects.store import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes none."""


def run(store: Store, _: argparse.Namespace) -> Output:
    """What was done; what else is wrong is for `verify` to tell."""
    from storage.maintenance.repair import repair

    filled, entered = repair(store, print_progress)
    what = f"{len(filled)} lost entries filled, {len(entered)} versions and aliases entered into the catalog"
    return Output({"filled": filled, "entered": entered}, [what])
