"""Show trajectories in the browser, with the cases that an audit found; import data sets.

python -m tasks.audit read demo
python -m tasks.audit --root s3://bucket/prefix read audits/1f0c4a7be23d5566
"""

import argparse
import socket
from collections.abc import Sequence
from pathlib import Path

from configs.audit import Audit
from storage import interrupts, layout
from storage.commands.program import Command, Output, run_command
from storage.objects.store import Store
from storage.version_names import ScoresVersion
from storage.versions import manifests
from tasks.audit.database import open_database
from tasks.audit.importing import command
from tasks.audit.run import REPORT, read_audit
from tasks.tables.sets import DataSet, Intake, fetch_data_sets, parse_since, select


def _read_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="RUN|URI|AUDIT",
        help="runs, versions or URIs of trajectories, or one audit (audits/…) with its cases; default: all runs",
    )
    parser.add_argument(
        "--since", default="", help="show only data sets committed since a date, or within a duration: 12h, 7d, 2w"
    )
    parser.add_argument("--port", type=int, default=8600, help="default 8600; 0: any free port")


def _read(store: Store, arguments: argparse.Namespace) -> Output:
    """Serve the reader until Ctrl-C.

    Raises:
        ValueError: a target names no data set, or there is nothing to show.
        OSError: the port is taken.
        UnavailableError: the store does not answer.
    """
    roots = [root for target in arguments.targets if (root := layout.split_uri(target)[0])]
    store = Store(roots[0]) if roots else store
    targets, cache, audit = [layout.split_uri(target)[1] for target in arguments.targets], Path(arguments.cache), None
    audits = [target for target in targets if target.startswith("audits/")]
    if audits and len(targets) > 1:
        raise ValueError(f"{audits[0]} already names its data sets: give it alone, without {len(targets) - 1} others")
    if audits:
        _, audit = read_audit(store, audits[0], cache)
        parents = [parent.version for parent in manifests.read(store, audits[0]).parents]
        targets = [version for version in parents if not ScoresVersion.is_place(version)]
        if not targets:
            raise ValueError(f"{audits[0]} could not read any data set: see its report, {audit / REPORT}")
    data_sets = select(store, targets, parse_since(arguments.since))
    if not data_sets:
        raise ValueError(f"there are no trajectories in {store.root}, or none since that date: name another")
    intake = fetch_data_sets(store, data_sets, cache)
    with open_database(data_sets, intake, Audit()) as database:
        from transformers import AutoTokenizer  # noqa: F401  # takes seconds: the first page should not wait for it

        from tasks.audit.reader.serving import ADDRESS, serve
        from tasks.audit.reader.views import create_app

        with socket.create_server((ADDRESS, arguments.port)) as listener:
            app = create_app(store, data_sets, database, cache, audit, unreadable(data_sets, intake))
            serve(app, listener, "The reader")
    return Output({})


def unreadable(data_sets: Sequence[DataSet], intake: Intake) -> list[str]:
    """Return sentences about data that cannot be shown."""
    gone = [f"{each.version}: {each.problem}" for each in data_sets if each.version in intake.collected]
    return gone + [f"{case.id}: {case.detail}" for case in (*intake.damaged, *intake.foreign)]


COMMANDS = {
    "read": Command("browse trajectories, their tokens and groups, and an audit's cases", _read_arguments, _read),
    "import": Command("make data sets of the rollouts of another program", command.add_arguments, command.run),
}


def main() -> int:
    """Run the command line, and return the exit status."""
    others = "python -m tasks.provenance reports which checkpoint was trained on which problem, and excludes problems."
    return run_command(COMMANDS, "python -m tasks.audit", __doc__, others)


if __name__ == "__main__":
    interrupts.run(main)
