"""Looks after a store: its versions, where they come from, whether they are whole, and what may go.

python -m storage ls
python -m storage --root s3://bucket/prefix verify demo/latest --deep
"""

import argparse
from typing import TYPE_CHECKING

from storage import interrupts
from storage.commands.program import Program

if TYPE_CHECKING:
    from storage.objects.store import Store

COMMANDS = {
    "ls": "the newest versions",
    "show": "one version: files, parents, metrics, configuration",
    "lineage": "what a version was made from, all the way down, or what came of it",
    "verify": "whether versions and all they were made from are whole",
    "diff": "how configuration and metrics of two versions differ",
    "alias": "names that point at versions: list, set, history, rollback",
    "gc": "what nobody needs any more; deletes it with --delete",
    "repair": "make catalog and other logs whole again, where entries were lost or damaged",
    "doctor": "whether a place can be trusted with versions: races, permissions, clocks, multipart",
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
"""Who asks what is wrong does not want to wait for it to come right."""


def main() -> int:
    """Command line. Status 0, 1 for an error or a problem found, 2 for a wrong command."""
    return PROGRAM.main(_open)


def _open(arguments: argparse.Namespace) -> "Store":
    from storage.logs.catalog import check_not_empty
    from storage.objects.store import Store

    if arguments.command == "doctor":  # which may examine a place before it is used
        return Store(arguments.root, **_DOCTOR_PATIENCE)
    store = Store(arguments.root)
    check_not_empty(store)
    return store


if __name__ == "__main__":
    interrupts.run(main)
