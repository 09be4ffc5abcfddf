"""The command line that all flows share: a configuration, dotted overrides, and the flow's own options."""

import argparse
import functools
import inspect
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from prefect import Flow

from configs import Config, ConfigError, available, to_yaml
from flows.launch.temporary_server import temporary_server
from storage import interrupts
from storage.commands.arguments import Parser, whole
from storage.commands.output import print_error
from storage.visible import printable

Command = Callable[[Config], str]
"""What a flow's command line does instead of running the flow; returns what to print."""
ADVICE = "the same command goes on from what is committed"
_OWN = ("configs", "storage", "tasks")
_OVERRIDE = re.compile(r"[a-z_][a-z0-9_.]*=")


def main(
    run: "Flow[..., Any]", commands: Mapping[str, Callable[..., str]] | None = None, **options: int | str
) -> NoReturn:
    """Parse `sys.argv` and run the flow, or one of its `commands`; `options` are parameters of it with their defaults.

    A configuration that cannot be used ends with status 2 and a message, before anything starts; a run that
    fails ends with 1, an interrupted one with 130, a terminated one with 143.
    """
    parser = _parser(run)
    default = inspect.signature(run.fn).parameters["config"].default
    parser.add_argument(
        "config", nargs="?", default="", help=f"name of a configuration, or a YAML file's path; default {default}"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides: ppo.eps_clip=0.3")
    parser.add_argument("--print-config", action="store_true", help="print the resolved YAML and stop")
    _add_options(parser, run, options)
    parser.set_defaults(command=None)
    if commands:  # argparse cannot show the usage of a group without members
        instead = parser.add_mutually_exclusive_group()
        for name, command in commands.items():
            _add_command(instead, name, command)
    arguments = parser.parse_args()
    config, overrides = _sorted([arguments.config, *arguments.overrides], default)

    def act() -> None:
        from tasks.run.configuration import resolve

        resolved = resolve(config, overrides)
        if arguments.print_config:
            print(to_yaml(resolved), end="")
        elif arguments.command:
            print(printable(arguments.command(resolved)))
        else:
            with temporary_server():
                run(config, overrides, **_chosen(arguments, options))

    interrupts.run(lambda: _status(act), ADVICE)


def main_of_targets(run: "Flow[..., Any]", **options: int | str) -> NoReturn:
    """Like `main`, for a flow that looks at what is stored: the positional arguments are its `targets`."""
    parser = _parser(run)
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="RUN|URI|key=value",
        help="runs, versions or URIs; default: all runs. With an equals sign: a dotted override, storage.root=…",
    )
    default = inspect.signature(run.fn).parameters["config"].default
    parser.add_argument("--config", default=default, help=f"name of a configuration, or a YAML file; default {default}")
    _add_options(parser, run, options)
    arguments = parser.parse_args()
    overrides = [target for target in arguments.targets if _OVERRIDE.match(target)]
    targets = [target for target in arguments.targets if target not in overrides]

    def act() -> None:
        with temporary_server():
            run(targets, arguments.config, overrides, **_chosen(arguments, options))

    interrupts.run(lambda: _status(act), ADVICE)


def _sorted(words: list[str], default: str) -> tuple[str, list[str]]:
    """The configuration and its overrides, in whatever order they were given.

    A second word without an equals sign is left among the overrides, and refused as such.
    """
    overrides = [word for word in words if word]
    config = next((word for word in overrides if "=" not in word or Path(word).is_file()), "")
    if config:
        overrides.remove(config)
    return config or default, overrides


def _parser(run: "Flow[..., Any]") -> Parser:
    return Parser(
        prog=f"python -m {run.fn.__module__ if run.fn.__module__ != '__main__' else 'flows.' + run.fn.__name__}",
        description=(run.fn.__doc__ or "").split("\n\n")[0],
        epilog=f"configurations: {', '.join(available())}; every knob is documented in configs/schema.py",
    )


def _add_options(parser: argparse.ArgumentParser, run: "Flow[..., Any]", options: Mapping[str, int | str]) -> None:
    """Parameters of the flow with their defaults; what its docstring says of them is their help."""
    for option, value in options.items():
        said = re.search(rf"^ +{option}: (.+)$", run.fn.__doc__ or "", re.MULTILINE)
        about = f"{said[1]} Default: {value!r}." if said else f"default {value!r}"
        parser.add_argument(f"--{option.replace('_', '-')}", type=_type(value), default=value, help=about)


def _type(default: int | str) -> Callable[[str], int | str]:
    """Return the type of an option from its default value; every number is a count."""
    return whole(0) if isinstance(default, int) else str


def _chosen(arguments: argparse.Namespace, options: Iterable[str]) -> dict[str, int | str]:
    return {option: getattr(arguments, option) for option in options}


def _status(act: Callable[[], None]) -> int:
    """Do it; returns the status that `main` promises."""
    # Threads that spin while they wait make two busy processes on one machine ten times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_without_traceback)
    try:
        act()
    except ConfigError as error:
        print_error(error)
        return 2
    except (ValueError, RuntimeError, OSError) as error:  # Prefect has logged where it came from
        if not interrupts.is_lost_output(error):
            print_error(error)
        return 1
    return 0


def _without_traceback(record: logging.LogRecord) -> bool:
    """Drop the traceback of our own errors below level DEBUG: their message says what was wrong and what to do."""
    if record.exc_info and not logging.getLogger(record.name).isEnabledFor(logging.DEBUG):
        kind = record.exc_info[0]
        if kind and kind.__module__.partition(".")[0] in _OWN:
            record.exc_info = record.exc_text = None
    return True


def _add_command(group: "argparse._MutuallyExclusiveGroup", name: str, command: Callable[..., str]) -> None:
    """As an option; one that takes a number beside the configuration is named after what it numbers."""
    about = (command.__doc__ or "").split("\n")[0]
    _, *numbers = inspect.signature(command).parameters
    if not numbers:
        group.add_argument(f"--{name}", dest="command", action="store_const", const=command, help=about)
        return

    def numbered(text: str) -> Command:
        return functools.partial(command, **{numbers[0]: int(text)})

    group.add_argument(f"--{name}", dest="command", type=numbered, metavar=numbers[0].upper(), help=about)
