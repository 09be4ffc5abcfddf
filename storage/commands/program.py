"""A program of several commands, such as `python -m storage`. Each command is a module with two functions:

add_arguments(parser)                    declares what the command takes
run(store, arguments) -> Output          does its work, and returns what to print
"""

import argparse
import importlib
import logging
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from storage.commands.arguments import Parser, parse_with_shared
from storage.commands.output import Output, print_error

if TYPE_CHECKING:
    from storage.objects.store import Store


def _open(arguments: argparse.Namespace) -> "Store":
    from storage.objects.store import Store

    return Store(arguments.root)


@dataclass(frozen=True, slots=True)
class Program:
    """What a program is called, what it can do, and where its commands are.

    Example: Program("python -m storage", "Looks after a store.", "…", "storage.commands", {"ls": "new versions"})
    """

    name: str
    about: str
    epilog: str
    package: str  # of the modules of its commands
    commands: Mapping[str, str]  # what each does, by name
    former: Mapping[str, str] = field(
        default_factory=dict
    )  # module by former name; they work, and help is silent on them
    cached: bool = False  # whether it reads data, and so takes --cache

    def main(self, open_store: Callable[[argparse.Namespace], "Store"] = _open) -> int:
        """Parse `sys.argv`, run the command and print its output; returns the exit status.

        It is 1 after an error, which is printed, and else the command's own. Wrong arguments end the process with 2.
        """
        arguments = self._parse()
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `… | head` is no error
        try:
            output: Output = importlib.import_module(arguments.module).run(open_store(arguments), arguments)
        except (ValueError, OSError) as error:
            print_error(error)
            return 1
        output.print(as_json=arguments.json)
        return output.status

    def _parse(self) -> argparse.Namespace:
        shared = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        shared.add_argument("--root", default="./var", help="local folder or s3://bucket/prefix; default ./var")
        if self.cached:
            shared.add_argument(
                "--cache", default="./var/cache", help="folder for data of a remote root; default ./var/cache"
            )
        shared.add_argument("--json", action="store_true", help="print JSON instead of tables")
        parser = Parser(prog=self.name, description=self.about, epilog=self.epilog, parents=[shared])
        commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
        for name, about in self.commands.items():
            description = f"{about[0].upper()}{about[1:]}."
            self._add(commands.add_parser(name, help=about, description=description), f"{self.package}.{_module(name)}")
        for name, module in self.former.items():
            self._add(commands.add_parser(name), module)
        return parse_with_shared(parser, shared)

    def _add(self, command: argparse.ArgumentParser, module: str) -> None:
        command.set_defaults(module=module)
        importlib.import_module(module).add_arguments(command)


def _module(command: str) -> str:
    return command.replace("-", "_")
