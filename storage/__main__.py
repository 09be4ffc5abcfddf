"""Inspect and maintain a store: list versions, show their lineage, verify them, and delete what is not needed.

python -m storage ls
python -m storage --root s3://bucket/prefix verify demo/latest --deep
"""

import argparse

from storage import interrupts
from storage.commands.program import Program
from storage.objects.store import Store

COMMANDS = {
    "ls": "list the newest versions",
    "show": "show one version: files, parents, metrics, configuration",
    "lineage": "show everything that a version was made from, or everything made from it",
    "verify": "check that versions and everything they were made from are whole",
    "diff": "show how configuration and metrics of two versions differ",
    "alias": "names that point at versions: list, set, history, rollback",
    "gc": "show data that are not needed any more; delete them with --delete",
    "repair": "replace lost and damaged entries of the catalog and of other logs",
    "doctor": "check that a place can be trusted with versions: races, permissions, clocks, multipart",
}
PROGRAM = Program(
    name="python -m storage",
    about=(__doc__ or "").splitlines()[0],
    epilog="VERSION is a version's name (runs/demo/checkpoints/000100), its URI, or an alias (demo/latest).",
    package="storage.commands",
    commands=COMMANDS,
    former={"mend": "storage.commands.repair"},
)
_DOCTOR_PATIENCE = {"request_timeout_s": 10, "patience_s": 20}
"""Short limits: `doctor` reports a failing place at once instead of waiting until it recovers."""


def main() -> int:
    """Run the command line. The status is 0, 1 for an error or a problem found, or 2 for wrong arguments."""
    return PROGRAM.main(_open)


def _open(arguments: argparse.Namespace) -> Store:
    from storage.logs.catalog import check_not_empty
    from storage.objects.store import Store

    if arguments.command == "doctor":  # it may examine a place that is still empty
        return Store(arguments.root, **_DOCTOR_PATIENCE)
    store = Store(arguments.root)
    check_not_empty(store)
    return store


if __name__ == "__main__":
    interrupts.run(main)
