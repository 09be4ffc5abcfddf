"""The command line of all flows: a configuration, dotted overrides and the flow's own options; and what it prints.

That is the story of the run, without the lines of Prefect (`--verbose` shows them). Progress is a line that changes if
standard error is a terminal. Elsewhere it is a line now and then, so that a file stays short.
"""

import contextlib
import functools
import inspect
import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn, get_args, get_origin

import prefect
from prefect import Flow
from rich.console import Console as Terminal
from rich.live import Live
from rich.text import Text

from configs import Config, ConfigError, to_yaml
from configs.loader import available
from flows.launch.temporary_server import temporary_server
from flows.run.configuration import plan, resolve
from storage import interrupts
from storage.commands.program import Parser, print_progress, whole
from storage.processes.folder import keep_compiled_code_private
from storage.visible import Fleeting, of_library, print_clean_logs, printable, traceback_without, with_own_line

Command = Callable[..., str]
"""A command of a flow's command line that runs instead of the flow.

It takes the configuration and perhaps a number, and returns the text to print. The first line of its docstring is its
help.
"""
ADVICE = "the same command continues from the committed versions"


def main(
    run: "Flow[..., Any]",
    commands: Mapping[str, Command] | None = None,
    ahead: Callable[[Config], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    meanwhile: Callable[[Config], object] = lambda _: None,
) -> NoReturn:
    """Parse `sys.argv` and run the flow or one of its `commands`.

    Words are dotted overrides and the name of a configuration, which may stand anywhere; of a flow that has `targets`
    they are overrides and targets. An invalid configuration ends the process with status 2 and a message, before
    anything starts. A failed run ends it with 1, an interrupted one with 130, a terminated one with 143.

    Args:
        run: the flow.
        commands: what may be done instead, by the name of the option.
        ahead: begins what the flow will need, before the Prefect server starts, and ends it after the flow.
        meanwhile: what is done while the Prefect server starts.
    """
    parameters = inspect.signature(run.fn).parameters
    with_targets = "targets" in parameters
    arguments = _parser(run, commands or {}).parse_args()
    pattern = r"^[^:/=]+=" if with_targets else "="  # a target may be a URI with this sign
    overrides = [word for word in arguments.words if re.search(pattern, word) and not os.path.isfile(word)]
    words = [word for word in arguments.words if word not in overrides]
    overrides += [] if arguments.root is None else [f"storage.root={json.dumps(arguments.root, ensure_ascii=False)}"]
    given = {option: getattr(arguments, option) for option in parameters.keys() - _WORDS}
    if with_targets:
        config, given["targets"] = arguments.config, words
    else:
        config, *unreadable = words or [parameters["config"].default]
        overrides += unreadable  # they are refused with the others
        overrides += [f"policy.fork={json.dumps(arguments.fork)}"] if arguments.fork else []

    def act() -> None:
        resolved = resolve(config, overrides)  # also before a flow, in which a mistake would be an error of Prefect's
        if arguments.command:
            text = arguments.command(resolved).rstrip("\n")
            with interrupts.reader_may_go():
                print(text if arguments.command is to_yaml else printable(text))  # YAML stays as it can be read again
            return
        with ahead(resolved), temporary_server(functools.partial(meanwhile, resolved)):
            run(config=config, overrides=overrides, **given)

    interrupts.run(lambda: status(act, verbose=arguments.verbose), ADVICE)


_WORDS = {"config", "overrides", "targets"}
"""The parameters of a flow that its command line has as words; each other one is an option."""


def _parser(run: "Flow[..., Any]", commands: Mapping[str, Command]) -> Parser:
    """Return the parser of a flow, whose help is in the flow's docstring; see `main`."""
    parameters, document = inspect.signature(run.fn).parameters, run.fn.__doc__ or ""
    default, with_targets = parameters["config"].default, "targets" in parameters
    parser = Parser(
        prog=f"python -m {run.fn.__module__ if run.fn.__module__ != '__main__' else 'flows.' + run.fn.__name__}",
        description=document.split("\n\n")[0],
        epilog=f"configurations: {', '.join(available())}; `python -m configs` shows every knob",
    )
    about = f"name of a configuration, or a YAML file's path; default {default}"
    if with_targets:
        parser.add_argument("--config", default=default, help=about)
        about = "runs, versions or URIs; default: all runs"
    metavar = "RUN|URI|key=value" if with_targets else "CONFIG|key=value"
    about += ". With an equals sign: a dotted override, such as storage.root=…"
    parser.add_argument("words", nargs="*", metavar=metavar, help=about)
    for option in (parameter for name, parameter in parameters.items() if name not in _WORDS):
        documented = re.search(rf"^ +{option.name}: (.+)$", document, re.MULTILINE)
        reads: dict[str, Any] = {"type": whole(0) if isinstance(option.default, int) else str}  # numbers are counts
        if option.default is None:  # a list
            reads = {"action": "append", "metavar": "NAME"}
        elif get_origin(option.annotation) is Literal:
            reads = {"choices": get_args(option.annotation)}
        about = f"{documented[1] if documented else ''} Default: {option.default or 'none'}."
        parser.add_argument(f"--{option.name.replace('_', '-')}", default=option.default, help=about, **reads)
    parser.add_argument("--root", help="local folder or s3://bucket/prefix; the same as storage.root=ROOT")
    parser.add_argument("--verbose", action="store_true", help="print Prefect's own lines and tracebacks, too")
    if not with_targets:
        about = "begin another run with checkpoint N of RUN, its optimizer included; give run.name=…, too"
        parser.add_argument("--fork", metavar="RUN@N", help=about)
    instead = parser.add_mutually_exclusive_group()
    always: dict[str, Command] = {"print-config": to_yaml} if with_targets else {"print-config": to_yaml, "plan": plan}
    for name, command in {**always, **commands}.items():
        _add_command(instead, name, command)
    return parser


def _add_command(parser: Any, name: str, command: Command) -> None:
    """Add a command as an option; its second parameter, if any, is a number and names the option's value."""
    _, *numbers = inspect.signature(command).parameters
    value: dict[str, Any] = {"action": "store_const", "const": command}
    if numbers:
        value = {
            "type": lambda text: functools.partial(command, **{numbers[0]: whole(1)(text)}),
            "metavar": numbers[0].upper(),
        }
    parser.add_argument(f"--{name}", dest="command", help=(command.__doc__ or "").split("\n")[0], **value)


def status(act: Callable[[], None], *, verbose: bool) -> int:
    """Run `act`; return the exit status that `main` documents. An error is printed once, with the user's own line.

    Call it before anything imports torch.
    """
    share_cores()
    keep_compiled_code_private()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    print_clean_logs()
    with contextlib.nullcontext() if verbose else contextlib.closing(log_to_console()):
        try:
            act()
            return 0
        except Exception as error:  # noqa: BLE001 - it is printed
            failed = error
    is_expected = isinstance(failed, OSError) or (
        isinstance(failed, ValueError | RuntimeError) and not of_library(failed)
    )
    print_progress(with_own_line(f"error: {failed}", failed) if is_expected else traceback_without(failed, "prefect"))
    return 2 if isinstance(failed, ConfigError) else 1


_EVERY_S = 30.0
"""Seconds between two lines of progress where there is no terminal."""
_PREFECT = os.path.dirname(prefect.__file__) + os.sep
_STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "red"}


class _Terminal(Terminal):
    """A terminal whose cursor is never hidden: a command that is killed could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        return show


class Console(logging.Handler):
    """A handler for all log records of a command, in place of Prefect's."""

    def __init__(self) -> None:
        super().__init__()
        self._terminal = _Terminal(stderr=True, highlight=False, soft_wrap=True)
        self._printed = time.monotonic()
        self._line = Live(console=self._terminal, transient=True, redirect_stdout=False)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if isinstance(record.msg, Fleeting):
                self._show(printable(record.getMessage()))
            # Errors that Prefect's engine logs are printed at the end, once.
            elif record.name not in ("prefect.flow_runs", "prefect.task_runs") or _PREFECT not in record.pathname:
                self._print(record)
        except Exception:  # noqa: BLE001 - as every handler: an error of logging ends no run
            self.handleError(record)

    def close(self) -> None:
        self._line.stop()
        super().close()

    def _print(self, record: logging.LogRecord) -> None:
        kind = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        line = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {kind}{record.getMessage()}"
        if record.exc_info:
            line += "\n" + logging.Formatter().formatException(record.exc_info)
        self._line.stop()  # tables may follow
        self._terminal.print(printable(line), markup=False, style=_STYLES.get(record.levelno, ""))
        self._printed = time.monotonic()

    def _show(self, progress: str) -> None:
        """Show a line of progress until the next line, on a terminal; elsewhere print it if it is time again."""
        if self._terminal.is_terminal:
            self._line.update(Text(progress))
            self._line.start()
        elif time.monotonic() - self._printed > _EVERY_S:
            self._terminal.print(progress, markup=False)
            self._printed = time.monotonic()


def log_to_console() -> Console:
    """Print records with a `Console` from now on, instead of with Prefect's handler."""
    console, root = Console(), logging.getLogger()
    root.handlers = [console]
    return console


_SPINS = "1000"
"""Number of times that a thread looks for work before it sleeps. On two cores an update alone is 1.5 times as fast as
with 0; two updates at once take 1.3 times as long. With 10,000 those take four times as long."""


def share_cores() -> None:
    """Set how threads wait, unless the environment says otherwise. Call it before anything imports torch.

    By default OpenMP's threads spin for so long that trainer and servers on the same cores become ten times slower.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)  # stronger than the policy, where GNU's OpenMP is used
