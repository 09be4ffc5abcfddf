"""A program with several commands, such as `python -m storage`. Each command is a module with two functions:

add_arguments(parser)                    declares the arguments of the command
run(store, arguments) -> Output          does the work and returns what to print
"""

import argparse
import importlib
import logging
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from storage.commands.arguments import Parser, parse_with_shared
from storage.commands.output import Output, print_error
from storage.objects.store import Store
from storage.visible import print_clean_logs


def _open(arguments: argparse.Namespace) -> Store:
    from storage.objects.store import Store

    return Store(arguments.root)


@dataclass(frozen=True, slots=True)
class Program:
    """The name, help texts and commands of a program.

    Example: Program("python -m storage", "Inspect a store.", "…", "storage.commands", {"ls": "list versions"})
    """

    name: str
    about: str
    epilog: str
    package: str  # package of the commands' modules
    commands: Mapping[str, str]  # the help text of each command, by its name
    former: Mapping[str, str] = field(default_factory=dict)  # modules by former command names, which help does not list
    cached: bool = False  # whether its commands read data, and so take --cache

    def main(self, open_store: Callable[[argparse.Namespace], Store] = _open) -> int:
        """Parse `sys.argv`, run the command, print its output and return the exit status.

        After an error, which is printed, the status is 1; otherwise the command chooses it. Wrong arguments end the
        process with status 2.
        """
        arguments = self._parse()
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
        print_clean_logs()
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `… | head` is not an error
        try:
            output: Output = importlib.import_module(arguments.module).run(open_store(arguments), arguments)
            output.print(as_json=arguments.json)
        except (ValueError, OSError) as error:
            print_error(error)
            return 1
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
