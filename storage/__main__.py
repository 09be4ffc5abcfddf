"""Inspect and maintain a store: list, verify, copy and export versions, show their lineage, delete what is not needed.

python -m storage ls
python -m storage --root s3://bucket/prefix verify demo/latest --deep
"""

import argparse

from storage import interrupts, layout
from storage.commands.program import run_command
from storage.commands.store import COMMANDS
from storage.logs.catalog import check_not_empty
from storage.objects.store import Store

_VERSIONS = (
    "VERSION is a version's name (runs/demo/checkpoints/000100), its URI, which names the root, too, or an alias "
    "(demo/latest)."
)


def main() -> int:
    """Run the command line. The status is 0, 1 for an error or a problem found, or 2 for wrong arguments."""
    return run_command(COMMANDS, "python -m storage", __doc__, _VERSIONS, _open)


def _open(arguments: argparse.Namespace) -> Store:
    if arguments.command == "doctor":  # the root may be empty; a failing store is reported instead of waited for
        return Store(arguments.root, request_timeout_s=10, patience_s=20)
    named = [getattr(arguments, "version", ""), getattr(arguments, "left", ""), *getattr(arguments, "versions", ())]
    roots = (layout.split_uri(name)[0] for name in named if not layout.is_alias(name))
    store = Store(next(filter(None, roots), arguments.root))
    check_not_empty(store)
    return store


if __name__ == "__main__":
    interrupts.run(main)
