"""`doctor`: tries out whether a place can be trusted with versions."""

import argparse
from dataclasses import asdict

from storage.commands.output import Output, table
from storage.maintenance.doctor import examine
from storage.objects.store import Store

_VERDICTS = {True: "ok", False: "PROBLEM", None: "-"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare no arguments: the root is enough."""


def run(store: Store, arguments: argparse.Namespace) -> Output:
    """Run all probes; the status is 1 if one of them found a problem."""
    checks = examine(store)
    rows = [(check.name, _VERDICTS[check.ok], check.found, check.consequence) for check in checks]
    bad = sum(check.ok is False for check in checks)
    verdict = f"{bad} problems" if bad else f"{store.root} can be trusted with versions"
    shown = table(["check", "", "found", "what would go wrong"], rows)
    return Output([asdict(check) for check in checks], [shown, verdict], int(bool(bad)))
