"""The command line of all flows: a configuration, dotted overrides and the flow's own options."""

import contextlib
import functools
import inspect
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from prefect import Flow

from configs import ConfigError, available, to_yaml
from flows.launch.console import tell
from flows.launch.temporary_server import temporary_server
from flows.launch.threads import share_cores
from storage import interrupts
from storage.commands.program import Parser, print_progress, whole
from storage.frames import of_library, traceback_without, with_own_line
from storage.visible import print_clean_logs, printable
from tasks.run.configuration import plan, resolve

Command = Callable[..., str]
"""A command of a flow's command line that runs instead of the flow.

It takes the configuration and perhaps a number, and returns the text to print.
"""
ADVICE = "the same command continues from the committed versions"
_OVERRIDE = re.compile(r"[a-z_][a-z0-9_.]*=")


def main(run: "Flow[..., Any]", commands: Mapping[str, Command] | None = None, **options: int | str) -> NoReturn:
    """Parse `sys.argv` and run the flow or one of its `commands`; `options` are the flow's parameters with defaults.

    An invalid configuration ends the process with status 2 and a message, before anything starts. A failed run ends it
    with 1, an interrupted one with 130, a terminated one with 143.
    """
    parser, default = _parser(run, options)
    about = f"name of a configuration, or a YAML file's path; default {default}"
    parser.add_argument("config", nargs="?", default="", help=about)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides: ppo.eps_clip=0.3")
    parser.add_argument("--print-config", action="store_true", help="print the resolved YAML and stop")
    parser.add_argument("--verbose", action="store_true", help="print Prefect's own lines and tracebacks, too")
    parser.add_argument("--plan", action="store_true", help="print ranks, servers and memory of the run and stop")
    about = "begin another run with checkpoint N of RUN, its optimizer included; give run.name=…, too"
    parser.add_argument("--fork", metavar="RUN@N", help=about)
    about = "continue although agents, environments, tools or scorers of your own have changed"
    parser.add_argument("--accept-code", action="store_true", help=about)
    for name, command in (commands or {}).items():
        _add_command(parser, name, command)
    arguments = parser.parse_args()
    overrides = [word for word in (arguments.config, *arguments.overrides) if word]
    # The configuration may stand anywhere. A second word without an equals sign is refused as an override.
    config = next((word for word in overrides if "=" not in word or Path(word).is_file()), "")
    if config:
        overrides.remove(config)
    config = config or default
    overrides += [f"policy={{fork: {json.dumps(arguments.fork)}}}"] if arguments.fork else []
    overrides += ["run.accept_code=true"] if arguments.accept_code else []

    def act() -> None:
        resolved = resolve(config, overrides)
        if arguments.print_config:
            print(to_yaml(resolved), end="")
        elif arguments.plan:
            print(plan(resolved), end="")
        elif commands and arguments.command:
            print(printable(arguments.command(resolved)))
        else:
            with temporary_server():
                run(config, overrides, **{option: getattr(arguments, option) for option in options})

    interrupts.run(lambda: _status(act, verbose=arguments.verbose), ADVICE)


def main_of_targets(run: "Flow[..., Any]", **options: int | str) -> NoReturn:
    """Parse `sys.argv` and run a flow on stored versions; as `main`, but the positional arguments are its `targets`."""
    parser, default = _parser(run, options)
    about = "runs, versions or URIs; default: all runs. With an equals sign: a dotted override, storage.root=…"
    parser.add_argument("targets", nargs="*", metavar="RUN|URI|key=value", help=about)
    parser.add_argument("--verbose", action="store_true", help="print Prefect's own lines and tracebacks, too")
    parser.add_argument("--config", default=default, help=f"name of a configuration, or a YAML file; default {default}")
    arguments = parser.parse_args()
    overrides = [target for target in arguments.targets if _OVERRIDE.match(target)]
    targets = [target for target in arguments.targets if target not in overrides]

    def act() -> None:
        with temporary_server():
            run(targets, arguments.config, overrides, **{option: getattr(arguments, option) for option in options})

    interrupts.run(lambda: _status(act, verbose=arguments.verbose), ADVICE)


def prepare_process() -> None:
    """Prepare this process for a flow. Call it before anything imports torch."""
    share_cores()
    os.environ.setdefault("DO_NOT_TRACK", "1")  # Prefect's client would report each flow run, and say so
    logging.getLogger("httpx").setLevel(logging.WARNING)
    print_clean_logs()


def _parser(run: "Flow[..., Any]", options: Mapping[str, int | str]) -> tuple[Parser, str]:
    """Return a parser with the flow's options, whose help is in the flow's docstring, and its default configuration."""
    document = run.fn.__doc__ or ""
    parser = Parser(
        prog=f"python -m {run.fn.__module__ if run.fn.__module__ != '__main__' else 'flows.' + run.fn.__name__}",
        description=document.split("\n\n")[0],
        epilog=f"configurations: {', '.join(available())}; `python -m configs` shows every knob",
    )
    for option, value in options.items():
        documented = re.search(rf"^ +{option}: (.+)$", document, re.MULTILINE)
        about = f"{documented[1] if documented else ''} Default: {value!r}."
        kind = whole(0) if isinstance(value, int) else str  # every number is a count
        parser.add_argument(f"--{option.replace('_', '-')}", type=kind, default=value, help=about)
    return parser, inspect.signature(run.fn).parameters["config"].default


def _add_command(parser: Parser, name: str, command: Command) -> None:
    """Add a command as an option; its second parameter, if any, is a number and names the option's value."""
    about = (command.__doc__ or "").split("\n")[0]
    _, *numbers = inspect.signature(command).parameters
    if not numbers:
        parser.add_argument(f"--{name}", dest="command", action="store_const", const=command, help=about)
        return

    def numbered(text: str) -> Command:
        return functools.partial(command, **{numbers[0]: whole(1)(text)})

    parser.add_argument(f"--{name}", dest="command", type=numbered, metavar=numbers[0].upper(), help=about)


def _status(act: Callable[[], None], *, verbose: bool) -> int:
    """Run `act`; return the exit status that `main` documents. An error is printed once, with the user's own line."""
    prepare_process()
    with contextlib.nullcontext() if verbose else contextlib.closing(tell()):
        try:
            act()
            return 0
        except Exception as error:  # noqa: BLE001 - it is printed
            failed = error
    is_told = isinstance(failed, OSError) or (isinstance(failed, ValueError | RuntimeError) and not of_library(failed))
    print_progress(with_own_line(f"error: {failed}", failed) if is_told else traceback_without(failed, "prefect"))
    return 2 if isinstance(failed, ConfigError) else 1
