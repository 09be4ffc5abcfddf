"""`mend`: the catalog made whole again."""

import argparse

from storage.commands.output import Output, say
from storage.store import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes none."""


def run(store: Store, _: argparse.Namespace) -> Output:
    """What was done; what else is wrong is for `verify` to tell."""
    from storage.mending import mend

    replaced, entered = mend(store, say)
    found = f"{len(replaced)} lost entries replaced, {len(entered)} versions and aliases entered"
    return Output({"replaced": replaced, "entered": entered}, [f"the catalog: {found}"])
