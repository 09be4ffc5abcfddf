"""Reads trajectories, answers what was trained on what, and excludes from training what turned out to be wrong.

python -m tasks.audit read demo
python -m tasks.audit trained-on 12+7
python -m tasks.audit --root s3://bucket/prefix falls 12+7
"""

import argparse
import importlib
import logging
import signal
from types import ModuleType

from storage import interrupts
from storage.arguments import Parser, parse_with_shared
from storage.commands.output import say_error

COMMANDS = {
    "read": "browse trajectories: filters, conversations, tokens, groups, and the cases of an audit",
    "trained-on": "which checkpoints were trained on a problem, directly or by descent",
    "saw": "what a checkpoint and all before it were trained on, problem by problem",
    "falls": "what falls if a problem's gold answer was wrong: trajectories, evaluations, checkpoints, aliases",
    "exclude": "make a version that keeps a problem, or trajectories, out of training",
}


def main() -> int:
    """Command line. Status 0, 1 for an error, 2 for a wrong command."""
    shared = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    shared.add_argument("--root", default="./var", help="local folder or s3://bucket/prefix; default ./var")
    shared.add_argument("--cache", default="./var/cache", help="folder for data of a remote root; default ./var/cache")
    shared.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser = Parser(
        prog="python -m tasks.audit",
        description=(__doc__ or "").splitlines()[0],
        epilog="PROBLEM: an id, a key (32 digits, of prompt and solutions) or, with --prompt, a part of the prompt.",
        parents=[shared],
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, what in COMMANDS.items():
        command = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        _module(name).add_arguments(command)
    arguments = parse_with_shared(parser, shared)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `… | head` is no error
    return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    from storage.store import Store

    try:
        output = _module(arguments.command).run(Store(arguments.root), arguments)
    except (ValueError, OSError) as error:
        say_error(error)
        return 1
    output.print(as_json=arguments.json)
    return int(output.status)


def _module(command: str) -> ModuleType:
    return importlib.import_module(f"tasks.audit.commands.{command.replace('-', '_')}")


if __name__ == "__main__":
    interrupts.run(main)
