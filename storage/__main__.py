"""Looks after a store: its versions, where they come from, whether they are whole, and what may go.

python -m storage ls
python -m storage --root s3://bucket/prefix verify demo/latest --deep
"""

import argparse
import importlib
import logging
import signal

from storage import interrupts
from storage.arguments import Parser, parse_with_shared
from storage.commands.output import say_error

COMMANDS = {
    "ls": "the newest versions",
    "show": "one version: files, parents, metrics, configuration",
    "lineage": "what a version was made from, all the way down, or what came of it",
    "verify": "whether versions and all they were made from are whole",
    "diff": "how configuration and metrics of two versions differ",
    "alias": "names that point at versions: list, set, history, back",
    "gc": "what nobody needs any more; deletes it with --delete",
    "mend": "make catalog and other logs whole again, where entries were lost or damaged",
    "doctor": "whether a place can be trusted with versions: races, permissions, clocks, multipart",
}

_DOCTORS_PATIENCE = {"request_timeout_s": 10, "patience_s": 20}
"""Who asks what is wrong does not want to wait for it to come right."""


def main() -> int:
    """Command line. Status 0, 1 for an error or a problem found, 2 for a wrong command."""
    shared = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    shared.add_argument("--root", default="./var", help="local folder or s3://bucket/prefix; default ./var")
    shared.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser = Parser(
        prog="python -m storage",
        description=(__doc__ or "").splitlines()[0],
        epilog="VERSION is a version's name (runs/demo/checkpoints/000100), its URI, or an alias (demo/latest).",
        parents=[shared],
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, what in COMMANDS.items():
        command = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        importlib.import_module(f"storage.commands.{name}").add_arguments(command)
    arguments = parse_with_shared(parser, shared)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `… | head` is no error
    return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    from storage.catalog import check_not_empty
    from storage.store import StorageError, Store

    patience = _DOCTORS_PATIENCE if arguments.command == "doctor" else {}
    try:
        store = Store(arguments.root, **patience)
        if arguments.command != "doctor":  # which may try a place before it is used
            check_not_empty(store)
        output = importlib.import_module(f"storage.commands.{arguments.command}").run(store, arguments)
    except (StorageError, OSError) as error:
        say_error(error)
        return 1
    output.print(as_json=arguments.json)
    return int(output.status)


if __name__ == "__main__":
    interrupts.run(main)
